"""The number of CPU threads of a running engine, chosen anew from the times of its own steps.

Which number is fastest for a small model depends on what else the machine does, and on how many requests run. So from
time to time some steps that only decode are computed with the other number, by turns with the present one. Only steps
of equally many requests are compared, and the times of a trial are medians, so that a step that something else held up
decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

from .openmp import considerate_threads, use_threads

TURN_STEPS = 6  # compared steps of a turn; one more before them, in which threads wake up, is not
NUM_TURNS = 4  # of a trial: present number, other, present, other
GAIN = 0.9  # share of the present number's time below which the other takes its place; nearer ones would alternate
FIRST_SECONDS, MOST_SECONDS = 1.0, 8.0  # between two trials; doubled by each that changes nothing


class ThreadChoice:
    """``number``: CPU threads that the engine's thread computes with. ``reason``: why, in a few words.

    Without an ``other`` number it never changes. All but the constructor is for the thread that computes.
    """

    def __init__(
        self,
        number: int,
        other: int | None = None,
        reason: str = "as asked for",
        *,
        use: Callable[[int], None] = use_threads,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.number, self.other, self.reason = number, other, reason
        self._use, self._clock = use, clock
        self._in_use = number
        self._pause = FIRST_SECONDS
        self._due = clock() + self._pause
        self._num_requests: int | None = None  # of each step of the trial under way
        self._times: list[float] = []

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Lets the calling thread compute with ``number`` threads, whatever it becomes."""
        self._use(self.number)
        with considerate_threads() if max(self.number, self.other or 1) > 1 else nullcontext():
            yield

    def note(self, num_requests: int | None, seconds: float) -> None:
        """Notes a step of ``num_requests`` single tokens, or None for one with chunks of prompts, and goes on."""
        if self.other is None:
            return
        if self._num_requests is None:
            if num_requests is not None and self._clock() >= self._due:
                self._num_requests = num_requests
            return
        if num_requests != self._num_requests:
            self._end_trial()
            return
        self._times.append(seconds)
        if len(self._times) == NUM_TURNS * (1 + TURN_STEPS):
            self._decide(self.other)
        else:
            self._compute_with(self.other if self._is_others(len(self._times)) else self.number)

    def _decide(self, other: int) -> None:
        compared = [place for place in range(len(self._times)) if place % (1 + TURN_STEPS)]
        present = median(self._times[place] for place in compared if not self._is_others(place))
        rival = median(self._times[place] for place in compared if self._is_others(place))
        self._pause = min(2 * self._pause, MOST_SECONDS)
        if rival < GAIN * present:
            self.number, self.other, self.reason = other, self.number, "steps are faster so"
            self._pause = FIRST_SECONDS
        self._end_trial()

    def _end_trial(self) -> None:
        self._num_requests, self._times = None, []
        self._due = self._clock() + self._pause
        self._compute_with(self.number)

    def _compute_with(self, number: int) -> None:
        if number != self._in_use:
            self._use(number)
            self._in_use = number

    @staticmethod
    def _is_others(place: int) -> bool:
        """Whether the other number computes the step at ``place`` of a trial."""
        return place // (1 + TURN_STEPS) % 2 == 1
