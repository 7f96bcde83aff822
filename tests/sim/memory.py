"""Memory reckoned again: the bytes and slots in use, counted place by place, and the room that is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .options import Options


class Memory:
    """Reads the arena of ``tables``. Relies on none of their counters."""

    def __init__(self, tables: Any, options: Options):
        self._tables, self._groups, self._block = tables, options.groups, options.block_nbytes

    def limit(self) -> int:
        """Bytes that ordinary allocations may take; the others are for demotions.

        Those take a slab, and of slabs of narrower rungs what blocks may leave free: in each group on as many rungs as
        there are floors in use. Where only one is, the last rung does not count in the group that finds no slot. Dense
        blocks in slabs may leave some free, too. States of equal sizes count as a group.
        """
        arena = self._tables.arena
        if all(len(group.sizes) == 1 for group in self._groups):
            return int(arena.nbytes)
        stuck, full, dense = [], [], set[int]()
        for sizes, floors in (chain for group in self._groups for chain in group.chains):
            number = len({floors[floor] for floor in self._tables._floors.values()} - {0}) or 1
            narrower = sizes[1:]
            rungs = narrower if number > 1 else narrower[:-1]
            stuck.append(self._largest(rungs, min(number, len(narrower) - 1)) if narrower else None)
            full.append(self._largest(narrower, number))
            dense |= {sizes[0]} - {self._block}
        most = max(one + sum(full) - full[index] for index, one in enumerate(stuck) if one is not None)
        return int(arena.nbytes - arena.slab_nbytes - most - self._largest(tuple(dense), len(dense)))

    def _largest(self, sizes: tuple[int, ...], number: int) -> int:
        """Bytes that a begun slab of each of ``sizes`` may leave free, of the ``number`` that leave most."""
        slab = self._tables.arena.slab_nbytes
        return sum(sorted((slab - slab // (slab // size) for size in sizes), reverse=True)[:number])

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
        slab, block = arena.slab_nbytes, self._block
        return sum(n * size if size == block else -(-n // (slab // size)) * slab for size, n in counts.items() if size)

    def room(self, size: int, live: Counter[int] | None = None, limit: int | None = None) -> int:
        """Slots of ``size`` that can still be had when every size is packed; ``live`` and ``limit`` if reckoned."""
        arena, counts, block = self._tables.arena, self.live() if live is None else live, self._block
        slab = arena.slab_nbytes
        others = sum(n * s if s == block else -(-n // (slab // s)) * slab for s, n in counts.items() if s != size)
        left = (self.limit() if limit is None else limit) - others
        most = left // size if size == block else left // slab * (slab // size)
        return max(0, most - counts[size])
