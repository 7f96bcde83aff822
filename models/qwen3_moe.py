"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from dataclasses import dataclass

from .config import FULL, SLIDING, ModelConfig, read_biases, read_num_layers
from .fields import Fields
from .llama import DecoderLayer, LlamaForCausalLM
from .moe import MoE, MoeConfig, read_moe, read_softmax_over
from .ranks import ALONE, Ranks


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoeConfig):
    """``dense_layers`` have an MLP of ``intermediate_size`` in place of experts."""

    dense_layers: frozenset[int]


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    """Qwen3-MoE: all layers have the window, if it is asked for."""
    fields = fields.given(
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, num_key_value_heads=4, sliding_window=4096
    )
    kind = SLIDING if fields.boolean("use_sliding_window", default=False) else FULL
    return Qwen3MoeConfig.read(
        fields,
        layer_types=(kind,) * read_num_layers(fields),
        **read_biases(fields),
        qk_norm=True,
        **read_moe(fields, "moe_intermediate_size"),
        softmax_over=read_softmax_over(fields),
        dense_layers=read_dense_layers(fields),
    )


def read_dense_layers(fields: Fields) -> frozenset[int]:
    """The layers without experts."""
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.error("mlp_only_layers", "must be a list of numbers of layers")
    step = fields.integer("decoder_sparse_step", 1, 2**20, default=1)
    return frozenset(layer for layer in range(read_num_layers(fields)) if layer in dense or (layer + 1) % step)


class Qwen3MoeLayer(DecoderLayer):
    """Llama's layer with experts, or with an MLP."""

    def __init__(self, config: Qwen3MoeConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        if layer not in config.dense_layers:
            self.mlp = MoE(config, ranks)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3-MoE."""

    layer_class = Qwen3MoeLayer
