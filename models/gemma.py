"""Gemma 2 and 3: norms before and after, their weights counted from 1; a scaled embedding; GELU; windows."""

from __future__ import annotations

from typing import Any

from .config import FULL, SLIDING, ModelConfig, read_biases, read_full_every, read_softcap, read_window_pattern
from .decoder_layers import SandwichLayer
from .fields import Fields
from .llama import LlamaForCausalLM
from .rope import read_ropes

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def read_gemma2(fields: Fields) -> ModelConfig:
    """Gemma 2: every other layer has a window; scores and logits are capped."""
    fields = fields.given(
        vocab_size=256_000,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        **_DEFAULTS,
    )
    kinds = read_full_every(fields, 2)
    return _read(fields, layer_types=kinds, softcap=read_softcap(fields, "attn_logit_softcapping"))


def read_gemma3(fields: Fields) -> ModelConfig:
    """Gemma 3: five of six layers have a window and a base of their own; a norm over each head of q and k."""
    fields = fields.given(vocab_size=262_208, max_position_embeddings=131_072, **_DEFAULTS)
    fields = fields.given(rope_theta=1_000_000.0, rope_local_base_freq=10_000.0)
    kinds = read_full_every(fields, read_window_pattern(fields, default=6))
    ropes = read_ropes(fields, {FULL: fields.get("rope_theta"), SLIDING: fields.get("rope_local_base_freq")})
    return _read(
        fields,
        layer_types=kinds,
        ropes=[ropes[kind] for kind in kinds],
        max_context=fields.get("max_position_embeddings"),  # states the context after scaling
        qk_norm=True,
    )


def _read(fields: Fields, **differences: Any) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "attention to later tokens is not supported")
    return ModelConfig.read(
        fields,
        scale=fields.number("query_pre_attn_scalar", 1e-3, 1e6) ** -0.5,
        activation_field="hidden_activation",
        **read_biases(fields),
        norm_offset=1.0,
        embedding_multiplier=fields.integer("hidden_size", 1, 2**20) ** 0.5,
        logit_softcap=read_softcap(fields, "final_logit_softcapping"),
        **differences,
    )


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma 2 and 3."""

    layer_class = SandwichLayer
