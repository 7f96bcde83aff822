"""What a deterministic engine supports: the rest is refused by name before weights are read."""

from __future__ import annotations

import torch

from qkv_engine.models.config import ModelConfig
from qkv_engine.models.moe import MoeConfig
from qkv_engine.models.weights.scheme import UNQUANTIZED

from .config import BLOCK_TOKENS, EngineConfig
from .device.layouts import Ladder
from .errors import ConfigError

_FIELD = "deterministic"


def check_deterministic(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises ``ConfigError`` for an option or a model with which a request's bits would depend on its neighbours.

    ``model`` as ``device`` keeps it.
    """
    if not config.deterministic:
        return
    kv = config.kv
    if len(kv.rungs) > 1 and not kv.eager:
        message = f"blocks of {kv.name} step down when others need memory"
        raise _error(message, "Give kv a ladder of one rung, such as bf16, or an eager one, such as int8 or kivi-2")
    if kv.bases is not None:
        raise _error(f"{kv.name} multiplies queries by bases, in products that depend on their number", "Leave kv out")
    if config.tensor_parallel > 1:
        raise _error("sums over GPUs depend on the number of tokens", "Leave tensor_parallel out")
    if config.host_memory is not None:
        raise _error("cached prefixes come back from host memory as they are", "Leave host_memory out")
    if config.kv_store is not None:
        raise _error("cached prefixes come back from files as they are", "Leave kv_store out")
    if config.max_num_batched_tokens < BLOCK_TOKENS:
        message = f"a prompt is computed {BLOCK_TOKENS} tokens at a time"
        raise _error(message, f"Set max_num_batched_tokens to {BLOCK_TOKENS} or more")
    if model.states:
        raise _error(f"layers of {model.architecture} have states", "Use a model of attention alone")
    if isinstance(model, MoeConfig):
        raise _error(f"{model.architecture} has experts, whose products depend on their tokens", "Use a dense model")
    if device.type == "cuda" and model.weights != UNQUANTIZED:
        message = f"products of {model.weights.name} weights depend on the number of rows"
        raise _error(message, "Use a checkpoint in 16 bits, and leave weights out")


def check_ladder(ladder: Ladder) -> None:
    """Raises ``ConfigError`` for formats that are made of a whole prompt."""
    if any(group.spec.has_bank for group in ladder.groups):
        raise _error(f"patterns of {ladder.name} are mined from a whole prompt", "Give another kv")


def _error(message: str, remedy: str) -> ConfigError:
    return ConfigError(message, field=_FIELD, value=True, remedy=remedy)
