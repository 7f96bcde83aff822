"""``Engine.sleep`` and ``Engine.wake``: the device given back while nothing is asked, for callers on any thread."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from traceback import clear_frames
from typing import TYPE_CHECKING, cast

from qkv_engine.models.basis import calibrated_variances
from qkv_engine.models.checkpoint import weights_digest

from .device.backend import Backend, StepLimits
from .device.logits import CausalLM
from .errors import ConfigError, ModelError
from .loading import enough_memory, load, make_backend
from .serving.basis_watch import BasisWatch, watch_bases

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from .config import EngineConfig
    from .device.runner import Runner
    from .kv.table_rows import TableLayout
    from .serving.core import EngineCore
    from .serving.loop import EngineLoop
    from .started import Started


@dataclass(frozen=True)
class Waker:
    """Loads the model again over the books of an engine that slept. Holds no memory: a core that is freed has it all.

    ``folder``: of the model;  ``digest``: what that of its checkpoint must still be, None for random weights.
    """

    config: EngineConfig
    device: torch.device
    layout: TableLayout
    limits: StepLimits
    folder: Path | None
    digest: str | None

    def wake(self, core: EngineCore) -> None:
        """Has ``core`` go on, or not fall asleep; for the engine's own thread. Whatever it raises, it sleeps on.

        Raises ``CapacityError`` where memory lacks now, ``ModelError`` for a checkpoint that was altered.
        """
        core.sleeper.end(None)  # who waits for it to fall asleep learns that it does not
        if not core.sleeper.is_asleep:
            return
        if self.folder is not None and self.digest is not None and weights_digest(self.folder) != self.digest:
            raise ModelError("the checkpoint was altered while the engine slept", field="model", value=str(self.folder))
        try:
            with enough_memory():
                backend, watch = self._load(core.runner)
        except BaseException as error:
            _clear_frames(error)  # they hold what was loaded for as long as somebody looks at the error
            core.runner.put_away()
            raise
        core.wake(backend, self.layout, watch)

    def _load(self, runner: Runner) -> tuple[Backend, BasisWatch | None]:
        """The backend of the model, loaded again, and the watch over its bases; KV memory is held again."""
        config, cache = self.config, runner.cache
        loaded, _ = load(config, self.device)
        cache.take_up()
        model = cast(CausalLM, loaded.model)
        rest = self.layout, cache.ladder, config.cuda_graphs, runner.host, config.deterministic
        backend = make_backend(model, cache.backing, *rest)
        if config.warm_up == "full":
            backend.capture(self.limits)
        return backend, watch_bases(cache, calibrated_variances(loaded.model))


def _clear_frames(error: BaseException | None) -> None:
    """Drops what the frames refer to that an error and its causes have passed."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
    done = loop.call(lambda: core.sleeper.begin())  # a core that was freed has none
    if not loop.is_own_thread:
        with suppress(Empty):
            error = done.get(timeout=timeout)
            if error is not None:
                raise error
    return core.sleeper.is_asleep
