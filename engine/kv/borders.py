"""Where a request leaves checkpoints of its states: borders of blocks, chosen ahead. No torch."""

from __future__ import annotations

from typing import NamedTuple

from .spec import GroupSpec


class Borders(NamedTuple):
    """The borders of one request, as counts of its tokens; ``group`` knows where blocks end.

    ``shared``: where the blocks that it found cached end, if they go on behind the checkpoint that it began on: other
    requests come that far, too. ``last``: the last border before the last token that it had when it began; 0 for none.
    Up to there a checkpoint comes ``every`` so many blocks, and behind it at each border.
    """

    group: GroupSpec
    every: int
    shared: int
    last: int

    @classmethod
    def of(cls, group: GroupSpec, every: int, num_tokens: int, num_cached: int) -> Borders:
        """For a request that begins with ``num_tokens``, of which the blocks of ``num_cached`` are cached."""
        shared = num_cached if num_cached > group.sink else 0
        return cls(group, every, shared, _border(group, _full(group, num_tokens - 1)))

    def after(self, num_computed: int) -> int:
        """The next border, more than ``num_computed`` tokens."""
        full = _full(self.group, num_computed)
        if num_computed >= self.last:
            return _border(self.group, full + 1)
        steady = _border(self.group, (full // self.every + 1) * self.every)
        return min(border for border in (self.shared, steady, self.last) if border > num_computed)


def _full(group: GroupSpec, num_tokens: int) -> int:
    """Full blocks of the first ``num_tokens``."""
    return max(0, group.in_blocks(num_tokens)) // group.block_tokens


def _border(group: GroupSpec, number: int) -> int:
    """Tokens up to the end of so many blocks; 0 for none, a sink alone is worth no checkpoint."""
    return group.tokens_in(number) if number else 0
