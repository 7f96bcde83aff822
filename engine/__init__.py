"""qkv-engine: LLM inference that lowers the precision of live KV blocks when memory runs short.

Names are imported on first use, so that ``import qkv_engine`` and ``qkv-engine --help`` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import DENSE16, Fit, KVConfig, RungConfig
    from .engine import Engine
    from .errors import (
        CapacityError,
        ConfigError,
        DeviceLostError,
        EngineDeadError,
        ModelError,
        QKVError,
        RankLostError,
        RequestError,
        UnavailableError,
    )
    from .metrics import EngineStats, RequestMetrics
    from .request import (
        CompletionOutput,
        KVUsage,
        Logprob,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputs,
    )
    from .request_stream import RequestStream

__version__ = "0.1.0"

_HOMES = {
    "DENSE16": "config",
    "Fit": "config",
    "KVConfig": "config",
    "RungConfig": "config",
    "Engine": "engine",
    "CapacityError": "errors",
    "ConfigError": "errors",
    "DeviceLostError": "errors",
    "EngineDeadError": "errors",
    "ModelError": "errors",
    "QKVError": "errors",
    "RankLostError": "errors",
    "RequestError": "errors",
    "UnavailableError": "errors",
    "EngineStats": "metrics",
    "CompletionOutput": "request",
    "KVUsage": "request",
    "Logprob": "request",
    "RequestMetrics": "metrics",
    "RequestOutput": "request",
    "RequestOutputKind": "request",
    "SamplingParams": "request",
    "StructuredOutputs": "request",
    "RequestStream": "request_stream",
}

__all__ = [
    "DENSE16",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DeviceLostError",
    "Engine",
    "EngineDeadError",
    "EngineStats",
    "Fit",
    "KVConfig",
    "KVUsage",
    "Logprob",
    "ModelError",
    "QKVError",
    "RankLostError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStream",
    "RungConfig",
    "SamplingParams",
    "StructuredOutputs",
    "UnavailableError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
