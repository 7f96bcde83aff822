"""qkv-engine: LLM inference that lowers the precision of live KV blocks when memory runs short.

Names are imported on first use, so that ``import qkv_engine`` and ``qkv-engine --help`` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv_engine.config import KVConfig
    from qkv_engine.engine import Engine
    from qkv_engine.errors import (
        CapacityError,
        ConfigError,
        EngineDeadError,
        ModelError,
        QKVError,
        RequestError,
    )
    from qkv_engine.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Engine": "engine",
    "KVConfig": "config",
    "SamplingParams": "request",
    "RequestOutput": "request",
    "CompletionOutput": "request",
    "QKVError": "errors",
    "ConfigError": "errors",
    "ModelError": "errors",
    "RequestError": "errors",
    "CapacityError": "errors",
    "EngineDeadError": "errors",
}

__all__ = [
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineDeadError",
    "KVConfig",
    "ModelError",
    "QKVError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
