"""Qwen2 and Qwen2.5: Llama's decoder with a bias on q, k and v (``ModelConfig.attention_bias``)."""

from __future__ import annotations

from .llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 under its checkpoint's name; nothing but the configuration differs from Llama."""
