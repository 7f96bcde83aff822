"""Model definitions and their loader. Models know tensors and checkpoints, not requests, schedules or KV formats."""

from __future__ import annotations

from .attention import AttentionBatch
from .config import ModelConfig
from .llama import LlamaForCausalLM
from .loader import LoadedModel, load_model
from .mistral import MistralForCausalLM
from .qwen2 import Qwen2ForCausalLM
from .qwen3 import Qwen3ForCausalLM
from .registry import MODELS
from .rope import RopeConfig
from .shapes import SHAPES

__all__ = [
    "MODELS",
    "SHAPES",
    "AttentionBatch",
    "LlamaForCausalLM",
    "LoadedModel",
    "MistralForCausalLM",
    "ModelConfig",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "RopeConfig",
    "load_model",
]
