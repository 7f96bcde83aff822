"""Replicas and fronts as a Ray Serve application."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import ray
from ray import serve
from ray._private import services
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle

from qkv_engine.config import EngineConfig
from qkv_engine.errors import ConfigError, QKVError
from qkv_engine.serve.keys import Keys
from qkv_engine.serve.limits import Limits

from .front import Front
from .placement import checked_options, resources_of
from .replica import Replica
from .scaling import wanted_replicas

logger = logging.getLogger("qkv_engine")

APP = "qkv-engine"  # name of the application in the cluster
MAX_REPLICAS = 4096
DOWNSCALE_SECONDS = 300.0  # of low load before a replica, and its prefix cache, is given up
POLL_SECONDS = 0.5  # between two looks at the requests under way; a shutdown is late by at most twice as much
CLOSING_SECONDS = 5.0  # grace period after the drain timeout for sending the final error events


@dataclass(frozen=True)
class Replicas:
    """The number of replicas: fixed where ``low`` is ``high``, else scaled with the load between the two.

    Raises ``ConfigError`` for a number out of range.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_REPLICAS:
            value = f"{self.low}..{self.high}"
            raise ConfigError("out of range", field="replicas", value=value, remedy=f"Give 1 to {MAX_REPLICAS:,}")

    @classmethod
    def parse(cls, text: str) -> Replicas:
        """The numbers of "2" or "2..8". Raises ``ConfigError``."""
        found = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", text)
        if found is None:
            raise ConfigError(
                "not a number", field="replicas", value=text, remedy='Give one, or a range such as "2..8"'
            )
        return cls(int(found[1]), int(found[2] or found[1]))


def connect(*, is_verbose: bool = False) -> None:
    """Connects this process to the Ray cluster of this machine, or starts one of this machine alone."""
    level = logging.INFO if is_verbose else logging.WARNING
    on_terminate = signal.getsignal(signal.SIGTERM)
    launch = partial(services.ConsolePopen, process_group=0)  # so that a signal to this process' group spares Ray
    with patch.object(services, "ConsolePopen", launch):
        ray.init(logging_level=level, log_to_driver=is_verbose, include_dashboard=False)
    signal.signal(signal.SIGTERM, on_terminate)  # which Ray replaces by its own


def start(
    replicas: Replicas,
    options: Mapping[str, Any],
    names: Sequence[str],
    *,
    host: str,
    port: int,
    limits: Limits,
    keys: Keys,
    sites: Mapping[str, Any],
) -> DeploymentHandle:
    """Serves ``replicas`` on every machine of the cluster that this process is connected to, until ``stop``.

    Returns the fronts. ``options`` are those of ``Engine``, the others those of ``make_app``, of which ``sites`` are
    what browsers may do.
    Raises ``ConfigError`` for an option out of range, and ``QKVError`` where the replicas do not start.
    """
    options = checked_options(options)
    resources = resources_of(options)
    _warn_if_short(resources, replicas.low)
    engines = serve.deployment(
        Replica,
        ray_actor_options=resources,
        max_ongoing_requests=options.get("max_num_seqs", EngineConfig.max_num_seqs),
        max_queued_requests=limits.max_requests,
        graceful_shutdown_timeout_s=limits.drain_timeout,
        request_router_config={
            "request_router_class": ConsistentHashRouter,
            "request_router_kwargs": {"num_fallback_replicas": replicas.high},
        },
        **_scale(replicas),
    ).bind(options, list(names), limits, keys, dict(sites))
    front = serve.deployment(
        serve.ingress()(Front),
        name="Front",
        num_replicas=replicas.high,  # ``MESSAGES_PER_SECOND`` of a replica take a core of a front
        ray_actor_options={"num_cpus": 0},  # so that two cores can hold two engines
        max_ongoing_requests=limits.max_connections,
        graceful_shutdown_timeout_s=limits.drain_timeout,
    ).bind(engines, limits)
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    try:
        return serve.run(front, name=APP)
    except RuntimeError as error:
        raise QKVError(f"the replicas do not start: {error}") from error


async def drain(fronts: DeploymentHandle, seconds: float) -> None:
    """Refuses further requests and returns once those under way have ended, after ``seconds`` in an error."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > -CLOSING_SECONDS:
        with suppress(TimeoutError):
            asked = fronts.broadcast("drain", max(left, 0.0))
            if not any(await asked.results_async(timeout_s=CLOSING_SECONDS, return_exceptions=True)):
                break
        await asyncio.sleep(POLL_SECONDS)
    await asyncio.sleep(POLL_SECONDS)  # for Ray's proxies, which pass on the last of the answers


def stop() -> None:
    """Gives up the replicas at once and leaves the cluster; other applications stay in it."""
    try:
        if APP in serve.status().applications:
            serve.delete(APP, _blocking=False)
            serve.status()  # which is answered after the deletion has begun
    finally:
        ray.shutdown()


def _warn_if_short(resources: Mapping[str, float], number: int) -> None:
    """Logs what the cluster lacks: Ray waits for it without end."""
    has = ray.cluster_resources()
    for name, kind in (("num_gpus", "GPU"), ("num_cpus", "CPU")):
        wanted = number * resources.get(name, 0)
        if wanted > has.get(kind, 0):
            logger.warning("replicas wait until the cluster has %g %ss; it has %g", wanted, kind, has.get(kind, 0))


def _scale(replicas: Replicas) -> dict[str, Any]:
    if replicas.low == replicas.high:
        return {"num_replicas": replicas.low}
    policy = {"policy_function": wanted_replicas}
    bounds = {"min_replicas": replicas.low, "max_replicas": replicas.high, "downscale_delay_s": DOWNSCALE_SECONDS}
    return {"autoscaling_config": {**bounds, "policy": policy}}
