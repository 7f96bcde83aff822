"""The recent window: the newest tokens of a request, whose blocks stay on the first rung until they are older."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class RecentWindow:
    """The newest ``num_tokens`` tokens of a request, or ``part`` of every ``whole`` computed ones where that is more.

    A token that has left the window never returns: each new one makes the window longer by one at most.
    """

    num_tokens: int = 0
    part: int = 0  # less than ``whole``
    whole: int = 1

    @classmethod
    def of(cls, num_tokens: int, ratio: Fraction) -> RecentWindow:
        """The window of ``num_tokens`` or of the share ``ratio`` in [0, 1)."""
        return cls(num_tokens, ratio.numerator, ratio.denominator)

    @property
    def ratio(self) -> Fraction:
        """The share of the computed tokens."""
        return Fraction(self.part, self.whole)

    def older(self, num_computed: int) -> int:
        """How many of ``num_computed`` tokens are older than the window; negative while the window is not full."""
        share = num_computed * self.part // self.whole
        return num_computed - (share if share > self.num_tokens else self.num_tokens)

    def least_computed(self, num_older: int) -> int:
        """The fewest computed tokens that leave ``num_older`` behind the window, the inverse of ``older``."""
        # Of n tokens the lesser of n - num_tokens and ceil(n * (whole - part) / whole) are older.
        return max(num_older + self.num_tokens, (num_older - 1) * self.whole // (self.whole - self.part) + 1)
