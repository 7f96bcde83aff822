"""OLMoE: OLMo 2's attention behind a norm, and a mixture of experts in every layer."""

from __future__ import annotations

from .config import ModelConfig, read_biases
from .fields import Fields
from .llama import DecoderLayer, LlamaForCausalLM
from .moe import MoE, MoeConfig, read_moe, read_softmax_over
from .olmo import OlmoAttention


def read_olmoe(fields: Fields) -> ModelConfig:
    """OLMoE, whose attention may have biases."""
    fields = fields.given(num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5)
    if fields.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "is not supported")
    return MoeConfig.read(fields, **read_biases(fields), **read_moe(fields), softmax_over=read_softmax_over(fields))


class OlmoeLayer(DecoderLayer):
    """Llama's layer with OLMo's attention, and experts."""

    attention_class = OlmoAttention
    mlp_class = MoE


class OlmoeForCausalLM(LlamaForCausalLM):
    """OLMoE."""

    layer_class = OlmoeLayer
