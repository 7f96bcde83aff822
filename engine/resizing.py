"""``Engine.resize``: another size of KV memory, for callers on any thread."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty

from .errors import ConfigError
from .intake import Intake
from .serving.loop import EngineLoop
from .serving.resizer import Resize
from .sizes import parse_size
from .started import Started


def resize(started: Started, loop: EngineLoop, intake: Intake, size: int | str | float, timeout: float | None) -> int:
    """Has KV memory resized and waits until it is, at most ``timeout`` seconds; returns the bytes held then.

    On the engine's own thread nothing is waited for. Raises as ``Engine.resize``.
    """
    core = started.core
    nbytes = parse_size(size, field="size", free=core.runner.cache.arena.range_nbytes)
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise ConfigError("not a time", field="timeout", value=timeout, remedy="Give seconds, 0 or more")

    def begin() -> Resize:
        under_way = core.resize(nbytes)
        intake.capacities = under_way.capacities  # here, so that of two sizes the later one counts
        return under_way

    under_way = loop.call(begin)
    if not loop.is_own_thread:
        with suppress(Empty):
            error = under_way.done.get(timeout=timeout)
            if error is not None:
                raise error
    return loop.call(lambda: core.runner.cache.nbytes)
