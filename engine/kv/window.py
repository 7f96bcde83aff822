"""The recent window: the newest tokens of a request, whose blocks stay on the first rung until they are older."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class RecentWindow:
    """The newest ``num_tokens`` tokens of a request, or ``ratio`` in [0, 1) of its computed ones where that is more.

    A token that has left the window never returns: each new one makes the window longer by one at most.
    """

    num_tokens: int = 0
    ratio: Fraction = Fraction(0)

    def older(self, num_computed: int) -> int:
        """How many of ``num_computed`` tokens are older than the window; negative while the window is not full."""
        part, whole = self.ratio.as_integer_ratio()
        return num_computed - max(self.num_tokens, num_computed * part // whole)

    def least_computed(self, num_older: int) -> int:
        """The fewest computed tokens of which ``num_older`` are older than the window, the inverse of ``older``."""
        # Of n tokens the lesser of n - num_tokens and ceil(n * (whole - part) / whole) are older.
        part, whole = self.ratio.as_integer_ratio()
        return max(num_older + self.num_tokens, (num_older - 1) * whole // (whole - part) + 1)
