"""Launched steps whose results have not been read yet, and their times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn

from qkv_engine.scheduler import Pace, ScheduledBatch

from ..device.mover import PendingMoves
from ..device.runner import Pending


@dataclass(frozen=True, slots=True)
class NotLaunched:
    """Stands for the results of a step that could not be launched."""

    error: Exception

    def wait(self) -> NoReturn:
        raise self.error


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: its batch, the moves before it, its results to come, and when work on it began.

    ``began_at`` is in seconds of ``time.monotonic()``. ``command``: number of the moves', as the host tier counts.
    """

    batch: ScheduledBatch
    moves: PendingMoves
    pending: Pending | NotLaunched
    began_at: float
    command: int


class StepTimer:
    """Tells a pace, if there is one, what each step with single tokens took.

    That is the time from the end of the step before, or from its own beginning if that is later: time without work
    belongs to no step. A step without single tokens lies between no two tokens of a request.
    """

    def __init__(self, pace: Pace | None):
        self._pace = pace
        self.seconds = 0.0  # of the step that ended last
        self._ended_at = 0.0  # that step, in seconds of ``time.monotonic()``

    def note(self, step: Launched) -> tuple[int | None, float]:
        """Notes that the results of ``step`` have been accepted.

        Returns the number of its single tokens, None if it has chunks, and its seconds.
        """
        now, num_chunk_tokens = time.monotonic(), step.batch.num_chunk_tokens
        seconds = self.seconds = now - max(step.began_at, self._ended_at)
        if self._pace is not None and step.batch.has_single_tokens:
            self._pace.note(seconds, num_chunk_tokens)
        self._ended_at = now
        return None if num_chunk_tokens else len(step.batch.items), seconds
