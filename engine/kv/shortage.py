"""What does not fit yet, while blocks are chosen to step down for it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .table import BlockTables


class Shortage:
    """Slots by size, and bytes, that are wanted; ``eased`` tells when those that blocks leave are enough for them."""

    def __init__(self, tables: BlockTables, wanted: Mapping[int, int], nbytes: int = 0):
        self._tables, self._extra, self._nbytes = tables, Counter(wanted), nbytes

    def eased(self, group: int, old: int, new: int, number: int = 1) -> bool:
        """Counts in that ``number`` blocks of a group step down from rung ``old`` to ``new``.

        Returns whether all fits then.
        """
        sizes = self._tables.groups[group].sizes
        self._extra[sizes[old]] -= number
        self._extra[sizes[new]] += number
        return self._tables.arena.has_room(self._extra, self._nbytes)

    def without(self, group: int, rung: int, number: int) -> bool:
        """Counts in that ``number`` blocks of a group on ``rung`` are given up; returns whether all fits then."""
        self._extra[self._tables.groups[group].sizes[rung]] -= number
        return self._tables.arena.has_room(self._extra, self._nbytes)
