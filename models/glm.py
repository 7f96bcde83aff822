"""GLM-4: a part of each head rotates in pairs of neighbours; the later release has norms before and after."""

from __future__ import annotations

from .config import ModelConfig
from .decoder_layers import SandwichLayer
from .fields import Fields
from .llama import LlamaForCausalLM
from .rope import RopeConfig


def read_glm(fields: Fields) -> ModelConfig:
    """GLM-4 of both releases; gate and up are one checkpoint tensor."""
    fields = fields.given(num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07, partial_rotary_factor=0.5)
    return ModelConfig.read(
        fields,
        rope=RopeConfig.from_hf(fields, may_be_partial=True, is_interleaved=True),
        attention_bias=fields.boolean("attention_bias", default=True),
        fused_gate_up=True,
    )


class Glm4Layer(SandwichLayer):
    """GLM-4's layer, by its names of the norms."""

    norm_names = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class Glm4ForCausalLM(LlamaForCausalLM):
    """GLM-4-0414."""

    layer_class = Glm4Layer
