"""Memory reckoned again: the bytes and slots in use, counted place by place, and the room that is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


class Memory:
    """Reads the arena of ``tables``; ``sizes`` are those of a block by rung. Relies on none of their counters."""

    def __init__(self, tables: Any, sizes: tuple[int, ...]):
        self._tables, self._sizes = tables, sizes

    def limit(self) -> int:
        """Bytes that ordinary allocations may take; the others are for demotions.

        Those take a slab, and of slabs of other rungs than the last what blocks may leave free: on as many rungs as
        there are floors in use, where these differ the last one counts, too.
        """
        arena, narrower = self._tables.arena, self._sizes[1:]
        if not narrower:
            return int(arena.nbytes)
        slab, floors = arena.slab_nbytes, {table.floor for table in self._tables._tables.values()} - {0}
        rungs = narrower if len(floors) > 1 else narrower[:-1]
        left = sorted(slab - slab // (slab // size) for size in rungs)
        number = min(len(floors) or 1, len(narrower) - 1)
        return int(arena.nbytes - slab - sum(left[len(left) - number :]))

    def live(self) -> Counter[int]:
        """Slots in use by size, counted place by place."""
        counts: Counter[int] = Counter(slot.nbytes for slot in self._tables.arena._blocks.values())
        for slab in self._tables.arena._slabs.values():
            counts[slab.slot_nbytes] += len(slab.live)
        return counts

    def packed(self, extra: Iterable[int] = (), less: Iterable[int] = ()) -> int:
        """Bytes in use when every size is packed, with ``extra`` slots and without those of ``less``."""
        arena, counts = self._tables.arena, self.live()
        counts.update(extra)
        counts.subtract(less)
        slab, block = arena.slab_nbytes, self._sizes[0]
        return sum(n * size if size == block else -(-n // (slab // size)) * slab for size, n in counts.items() if size)

    def room(self, size: int, live: Counter[int] | None = None) -> int:
        """Slots of ``size`` that can still be had when every size is packed."""
        arena, counts, block = self._tables.arena, self.live() if live is None else live, self._sizes[0]
        slab = arena.slab_nbytes
        others = sum(n * s if s == block else -(-n // (slab // s)) * slab for s, n in counts.items() if s != size)
        left = self.limit() - others
        most = left // size if size == block else left // slab * (slab // size)
        return max(0, most - counts[size])
