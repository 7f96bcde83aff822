"""Model classes by the architecture name in ``config.json``; a new architecture is a line here."""

from __future__ import annotations

from .llama import LlamaForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,  # v0.2 and later; ``ModelConfig.from_hf`` refuses a sliding window
    "Qwen2ForCausalLM": LlamaForCausalLM,  # with ``ModelConfig.attention_bias``
    "Qwen3ForCausalLM": LlamaForCausalLM,  # with ``ModelConfig.qk_norm``
}
