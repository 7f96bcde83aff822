"""Qwen3 (dense): Llama's decoder with an RMSNorm over each head of q and k (``ModelConfig.qk_norm``)."""

from __future__ import annotations

from .llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 under its checkpoint's name; nothing but the configuration differs from Llama."""
