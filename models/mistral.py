"""Mistral 7B v0.2 and later, Nemo and the like: Llama's decoder. ``ModelConfig.from_hf`` refuses a sliding window."""

from __future__ import annotations

from .llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral under its checkpoint's name; nothing but the configuration differs from Llama."""
