"""Qwen3.5, text: three layers of four keep a state; the others have attention whose output is gated. Dense or MoE."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import Addend
from qkv_engine.kernels.sigmoid_gate import sigmoid_gate

from .attention import Attention, AttentionBatch
from .config import FULL, ModelConfig, read_biases, read_num_layers
from .delta_net import DeltaNet, HybridConfig, PiecewiseLinear, StateBatch, read_states
from .fields import Fields
from .layers import Layer, Linear, Matrix, Projection, taken
from .llama import MLP, LlamaForCausalLM, make_norm
from .moe import MoE, MoeConfig, read_moe
from .ranks import ALONE, Part, Ranks
from .rope import RopeConfig, Rotation
from .weights.plain import PLAIN

Config = TypeVar("Config", bound=HybridConfig)


@dataclass(frozen=True, kw_only=True)
class HybridMoeConfig(HybridConfig, MoeConfig):
    """``shared_size``: inner features of the expert that all tokens share.

    ``dense_layers`` have an MLP of ``intermediate_size`` in place of experts.
    """

    shared_size: int
    dense_layers: frozenset[int] = frozenset()

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """See ``ModelConfig.inner_sizes``."""
        dense = (self.intermediate_size,) if self.dense_layers else ()
        return (*dense, self.expert_size, self.shared_size)


def read_hybrid(fields: Fields, config_class: type[Config], **differences: Any) -> Config:
    """What hybrids read alike: heads of 256 channels of which a quarter rotates, norms whose weights count from 1."""
    if not fields.boolean("attn_output_gate", default=True):
        raise fields.error("attn_output_gate", "attention without a gate is not supported here")
    fields = fields.given(head_dim=256, partial_rotary_factor=0.25)
    states = read_states(fields)
    config = config_class.read(
        fields,
        layer_types=(FULL,) * read_num_layers(fields),
        rope=RopeConfig.from_hf(fields, may_be_partial=True),
        **read_biases(fields),
        qk_norm=True,
        norm_offset=1.0,
        **states,
        **differences,
    )
    assert isinstance(config, config_class)
    num_attention = sum(layer is not None for layer in config.kv_layers)
    return replace(config, attention=config.attention[:num_attention])


def read_qwen3_5(fields: Fields) -> ModelConfig:
    """Qwen3.5, dense, and Qwen3.6."""
    fields = fields.given(
        vocab_size=248_320,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
    )
    return read_hybrid(fields, HybridConfig)


def read_qwen3_5_moe(fields: Fields) -> ModelConfig:
    """Qwen3.5 and Qwen3.6 with experts in all layers."""
    fields = fields.given(
        vocab_size=248_320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
    )
    shared_size = fields.integer("shared_expert_intermediate_size", 1, 2**20, default=512)
    fields = fields.without("intermediate_size").given(intermediate_size=fields.get("moe_intermediate_size"))
    return read_hybrid(fields, HybridMoeConfig, **read_moe(fields, "moe_intermediate_size"), shared_size=shared_size)


class GatedAttention(Attention):
    """Attention whose output is scaled by the sigmoid of a gate, which the query projection has beside each head."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        size, heads = self.head_dim, ranks.part(config.attention[layer].num_heads)
        rows = 2 * size * heads.whole
        first = [2 * size * head for head in range(heads.first, heads.first + heads.size)]
        gates = [("q_proj", Part(size, row + size, rows)) for row in first]
        queries = [("q_proj", Part(size, row, rows)) for row in first]
        keys = self.kv_heads.times(size)
        pieces = [*gates, *queries, ("k_proj", keys), ("v_proj", keys)]
        self.qkv_proj = PiecewiseLinear(config.hidden_size, pieces, bias=config.attention_bias)
        self.first_head = heads.size

    def mix(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None) -> Tensor:
        """See ``Attention.mix``."""
        gate, qkv = self.project(x, rows).tensor_split((self.first_head,), 1)
        gate = taken(gate.flatten(1), rows)  # not last: ``sigmoid_gate`` reads it while the kernel before still runs
        attended = taken(self.attend(qkv, rotation, batch).flatten(1), rows)
        return sigmoid_gate(attended, gate)

    def convert(self) -> None:
        """See ``Attention.convert``; here the norms over heads have a weight for each channel to reorder, too."""
        super().convert()
        if self._channel_order is not None and self.qk_norm is not None:
            weight = self.qk_norm.weight
            weight.copy_(weight[:, self._channel_order])


class SharedMoE(MoE):
    """Experts, and one that all tokens share, scaled by the sigmoid of a gate."""

    def __init__(self, config: HybridMoeConfig, ranks: Ranks = ALONE):
        super().__init__(config, ranks)
        self.shared_expert = MLP(replace(config, intermediate_size=config.shared_size), ranks)
        self.shared_gate = Linear(config.hidden_size, {"shared_expert_gate": 1}, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x and result [N, E]."""
        shared: Tensor = self.shared_gate(x).sigmoid() * self.shared_expert(x)
        return super().forward(x) + shared


class StackedMoE(SharedMoE):
    """All experts of a layer are two tensors where ``is_stacked``; else each expert has three."""

    is_stacked = True

    def matrices(self) -> Iterator[Matrix]:
        """See ``MoE.matrices``."""
        if self.is_stacked and (self.format is PLAIN or self.format.is_streamed):
            return self.stacked_matrices("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        return super().matrices()

    def names(self) -> Iterator[str]:
        """See ``QuantizableLayer.names``; asked before it is known whether experts are stacked."""
        return (projection.name for matrix in super().matrices() for projection in matrix.projections)

    def plain_name(self, projection: Projection) -> str:
        """See ``MoE.plain_name``."""
        return super().plain_name(projection) if projection.expert is None else projection.name


class HybridLayer(Layer):
    """Attention or a gated delta-net, then an MLP or experts, each behind a norm and added to the residual stream."""

    delta_class: type[DeltaNet] = DeltaNet
    moe_class: type[SharedMoE] = SharedMoE

    def __init__(self, config: HybridConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        kv_layer = config.kv_layers[layer]
        self.input_layernorm = make_norm(config, "input_layernorm")
        self.self_attn = None if kv_layer is None else GatedAttention(config, kv_layer, ranks)
        if kv_layer is None:
            self.linear_attn = self.delta_class(config, config.kv_layers[:layer].count(None), ranks)
        self.post_attention_layernorm = make_norm(config, "post_attention_layernorm")
        has_experts = isinstance(config, HybridMoeConfig) and layer not in config.dense_layers
        mlp_class: type[Any] = self.moe_class if has_experts else MLP
        self.mlp = mlp_class(config, ranks)

    def forward(
        self,
        x: Addend,
        residual: Tensor | None,
        rotation: Rotation,
        batch: StateBatch,
        rows: Tensor | None = None,
    ) -> tuple[Addend, Tensor]:
        """See ``DecoderLayer.forward``."""
        normed, residual = self.input_layernorm(x, residual)
        if self.self_attn is None:
            mixed = self.linear_attn.sums(normed, batch, rows)
        else:
            mixed = self.self_attn.sums(normed, rotation, batch, rows)
        normed, residual = self.post_attention_layernorm(mixed, taken(residual, rows))
        return self.mlp.sums(normed), residual


class StackedLayer(HybridLayer):
    """A layer whose experts may be stacked in the checkpoint."""

    moe_class = StackedMoE


class HybridForCausalLM(LlamaForCausalLM):
    """Qwen3.5, dense."""

    layer_class = HybridLayer
    draft_prefix = "mtp."


class Qwen3_5MoeForCausalLM(HybridForCausalLM):
    """Qwen3.5 with experts."""

    layer_class = StackedLayer

    def adapt(self, names: Set[str]) -> None:
        """See ``LlamaForCausalLM.adapt``: checkpoints have the experts stacked, or one by one.

        Raises ``ModelError`` for stacked ones that are quantized.
        """
        stacked = min((name for name in names if ".mlp.experts.gate_up_proj" in name), default=None)
        for module in self.modules():
            if not isinstance(module, StackedMoE):
                continue
            module.is_stacked = stacked is not None
            if module.is_stacked and not any(matrix.is_stacked for matrix in module.matrices()):
                raise ModelError(f"{stacked}: stacked experts are not supported in {module.format.name}")
