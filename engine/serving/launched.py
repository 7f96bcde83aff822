"""Launched steps whose results have not been read yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from qkv_engine.scheduler import ScheduledBatch

from ..device.runner import Pending
from ..kv.mover import PendingMoves


@dataclass(frozen=True, slots=True)
class NotLaunched:
    """Stands for the results of a step that could not be launched."""

    error: Exception

    def wait(self) -> NoReturn:
        raise self.error


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: its batch, the moves before it, its results to come, and when work on it began.

    ``began_at`` is in seconds of ``time.monotonic()``.
    """

    batch: ScheduledBatch
    moves: PendingMoves
    pending: Pending | NotLaunched
    began_at: float
