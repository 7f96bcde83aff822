"""``Engine.sleep`` and ``Engine.wake``: the device given back while nothing is asked, for callers on any thread."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from typing import TYPE_CHECKING, cast

from qkv_engine.models.basis import calibrated_variances
from qkv_engine.models.checkpoint import weights_digest

from .device.backend import StepLimits
from .device.logits import CausalLM
from .errors import ConfigError, ModelError
from .loading import enough_memory, load, make_backend
from .serving.basis_watch import watch_bases

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from .config import EngineConfig
    from .device.cache import KVCache
    from .device.host_memory import HostMemory
    from .kv.table_rows import TableLayout
    from .serving.core import EngineCore
    from .serving.loop import EngineLoop
    from .started import Started


@dataclass(frozen=True)
class Waker:
    """Loads the model again over the books of an engine that slept.

    ``folder``: of the checkpoint, whose ``digest`` must be what it was; None for random weights.
    """

    config: EngineConfig
    device: torch.device
    cache: KVCache
    layout: TableLayout
    limits: StepLimits
    host: HostMemory | None
    folder: Path | None
    digest: str | None

    def wake(self, core: EngineCore) -> None:
        """Has ``core`` go on, for the engine's own thread. Whatever it raises, the engine sleeps on.

        Raises ``CapacityError`` where memory lacks now, ``ModelError`` for a checkpoint that was altered.
        """
        if not core.sleeper.is_asleep:
            return
        if self.folder is not None and weights_digest(self.folder) != self.digest:
            raise ModelError("the checkpoint was altered while the engine slept", field="model", value=str(self.folder))
        with enough_memory():
            loaded, _ = load(self.config, self.device)
            self.cache.take_up()
            try:
                config, cache = self.config, self.cache
                model = cast(CausalLM, loaded.model)
                rest = self.layout, cache.ladder, config.cuda_graphs, self.host, config.deterministic
                backend = make_backend(model, cache.backing, *rest)
                if config.warm_up == "full":
                    backend.capture(self.limits)
            except BaseException:
                self.cache.put_away()
                raise
        core.wake(backend, self.layout, watch_bases(self.cache, calibrated_variances(loaded.model)))


def sleep(started: Started, loop: EngineLoop, timeout: float | None) -> bool:
    """Has the engine fall asleep and waits until it does, at most ``timeout`` seconds; returns whether it sleeps.

    On the engine's own thread nothing is waited for. Raises as ``Engine.sleep``.
    """
    core = started.core
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise ConfigError("not a time", field="timeout", value=timeout, remedy="Give seconds, 0 or more")
    if started.num_ranks > 1:
        remedy = "Close the engine, and make a new one"
        raise ConfigError("its ranks do not sleep", field="tensor_parallel", value=started.num_ranks, remedy=remedy)
    done = loop.call(core.sleeper.begin)
    if not loop.is_own_thread:
        with suppress(Empty):
            error = done.get(timeout=timeout)
            if error is not None:
                raise error
    return core.sleeper.is_asleep
