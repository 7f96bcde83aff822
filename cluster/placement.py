"""The machines' parts that a process with an engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from qkv_engine.config import EngineConfig, check_beside_fit
from qkv_engine.presets import resolve_kv


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``options`` of ``Engine`` with the ladder of ``kv`` itself, since other machines lack a plan's file.

    Raises ``ConfigError`` for one that is out of range or contradicts another.
    """
    found = dict(options)
    check_beside_fit(found.get("fit"), found)
    kv = resolve_kv(found.get("kv"), found.pop("state_dtype", None))
    EngineConfig(**{**found, "kv": kv})  # for its checks
    return found if kv == resolve_kv(None) else {**found, "kv": kv}


def resources_of(options: Mapping[str, Any]) -> dict[str, float]:
    """What Ray reserves for an engine with ``options``: the GPUs of its tensor-parallel group on one machine, or cores.

    The ranks are children of the one process that Ray starts, so that no group ever spans machines.
    """
    size: int = options.get("tensor_parallel", 1)
    device = str(options.get("device", "auto"))
    if not device.startswith("cpu") and ray.cluster_resources().get("GPU", 0) > 0:
        return {"num_gpus": size, "num_cpus": 1}
    return {"num_cpus": size * (options.get("num_threads") or 1)}
