"""A watch for ranks that stand still: stopped, frozen, or with a GPU that hangs.

A rank that ends is noticed at once. One that only stands still leaves the others waiting in the middle of an exchange.
It cannot be told from a long step by time alone: kernels are compiled and graphs captured for minutes, and a long
prompt takes a CPU as long. So a rank is asked, while nothing goes on: one that is at work answers, from a thread of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Patience(NamedTuple):
    """How long rank 0 waits while nothing goes on. Then the engine ends with ``RankLostError``.

    Fields
        silent: seconds for a rank that does not answer.
        still: seconds for a step while all ranks answer, the limit of torch.distributed for an exchange of NCCL.
        tick: seconds between two looks. They are counted, not measured: rank 0 may be stopped as well, by Ctrl-Z.
    """

    silent: float = 60.0
    still: float = 600.0
    tick: float = 1.0


class Progress:
    """Whether rank 0 is in the middle of a step, and a number that changes while it goes on."""

    def __init__(self) -> None:
        self._number, self._depth = 0, 0

    def note(self) -> None:
        """An exchange has ended."""
        self._number += 1

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Work that the other ranks can hold up."""
        self._depth += 1
        self._number += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def number(self) -> int | None:
        """Another one whenever something went on; ``None`` while nothing is under way."""
        return self._number if self._depth else None


class StallClock:
    """Counts the looks at one rank between which nothing went on."""

    def __init__(self, rank: int, patience: Patience):
        self._rank, self._patience = rank, patience
        self._number: int | None = None
        self._silent = self._still = 0

    def tick(self, number: int | None, has_answered: bool) -> str | None:
        """Why the engine cannot go on, if so.

        ``number``: of ``Progress``. ``has_answered``: whether the rank did since the last look.
        """
        goes_on = number is None or number != self._number
        self._number = number
        self._still = 0 if goes_on else self._still + 1
        self._silent = 0 if goes_on or has_answered else self._silent + 1
        silent, still, tick = self._patience
        if self._silent * tick >= silent:
            return f"rank {self._rank} stands still: no answer for {silent:g} s in the middle of a step"
        if self._still * tick >= still:
            return f"a step stands still: no exchange between the ranks has ended for {still:g} s"
        return None
