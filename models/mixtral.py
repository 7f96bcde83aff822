"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from .config import SLIDING, ModelConfig, read_num_layers
from .fields import Fields
from .llama import DecoderLayer, LlamaForCausalLM
from .moe import MoE, MoeConfig, read_moe


def read_mixtral(fields: Fields) -> ModelConfig:
    """Mixtral: all layers have the window, if there is one."""
    fields = fields.given(
        num_experts=8, num_experts_per_tok=2, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0
    )
    return MoeConfig.read(fields, layer_types=(SLIDING,) * read_num_layers(fields), **read_moe(fields))


class MixtralMoE(MoE):
    """Mixtral's names: ``w1`` is the gate, ``w3`` up, ``w2`` down."""

    router_name = "block_sparse_moe.gate"
    gate_name, up_name, down_name = (f"block_sparse_moe.experts.{{}}.w{number}" for number in (1, 3, 2))


class MixtralLayer(DecoderLayer):
    """Llama's layer with experts."""

    mlp_class = MixtralMoE


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral."""

    layer_class = MixtralLayer
