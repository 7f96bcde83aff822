"""The arena's books: which bytes of the one KV tensor are a slot of which size. No tensors, no torch.

Blocks on the widest rung lie side by side at the end of the arena. All other slots lie in slabs of equal size, which
grow from its beginning. A slab is given to one slot size and carved into equal slots; an empty one serves any size.
Free bytes may lie anywhere, but can always be gathered between the two (`evacuate`): `room` counts as if they had been.
There, too, lies the hole of an arena that has shrunk: addresses without memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from ..errors import QKVError
from .hole import Hole
from .places import Places


class ArenaError(QKVError):
    """The arena's books contradict themselves, or a dead slot was used: a bug in the engine."""


class Slot(msgspec.Struct, eq=False, gc=False):  # made by the hundred, and nothing to the garbage collector
    """``nbytes`` bytes at ``address`` of the arena while ``alive``. A freed slot is never revived."""

    address: int
    nbytes: int
    alive: bool = True


@dataclass(slots=True, eq=False)
class _Slab:
    slot_nbytes: int
    free: list[int]  # heap of addresses
    live: dict[int, Slot] = field(default_factory=dict)  # by address


class Arena:
    """Slots in ``nbytes`` bytes: those of ``block_nbytes`` side by side, all others in slabs of ``slab_nbytes``.

    ``reserve_nbytes`` are kept out of ordinary allocations, so that a demotion always finds a place to write. Owned by
    the KV cache for the engine's life. Memory may shrink, and grow again up to the ``range_nbytes`` of the start, in
    chunks of ``chunk_nbytes``: ``nbytes`` may be used now, ``goal_nbytes`` once a shrink under way is done.
    """

    def __init__(
        self, nbytes: int, slab_nbytes: int, reserve_nbytes: int = 0, *, block_nbytes: int = 0, chunk_nbytes: int = 1
    ):
        self.range_nbytes = self.nbytes = self.goal_nbytes = nbytes
        self.slab_nbytes, self.block_nbytes = slab_nbytes, block_nbytes
        self.reserve_nbytes = reserve_nbytes
        self.hole = Hole(nbytes, chunk_nbytes)
        self._slabs: dict[int, _Slab] = {}  # slabs in use, by place
        self._blocks: dict[int, Slot] = {}  # slots of ``block_nbytes``, by place
        self._slab_places, self._block_places = Places(), Places()  # from the beginning, and from the end
        self._partial: dict[int, set[int]] = {}  # slot size -> slabs with a free slot
        self._ranked: dict[int, list[tuple[int, int]]] = {}  # size -> heap of (-live slots, slab), some out of date
        self.live: Counter[int] = Counter()  # slot size -> live slots
        self._num_packed = 0  # slabs that all live slots would take if packed
        self.used_nbytes = 0
        self.peak_nbytes = 0

    def per_slab(self, nbytes: int) -> int:
        return self.slab_nbytes // nbytes

    def packed_nbytes(self, counts: Mapping[int, int]) -> int:
        """Bytes that ``counts``, slots by size, take when they are packed: blocks and whole slabs."""
        return sum(
            number * nbytes if nbytes == self.block_nbytes else -(-number // self.per_slab(nbytes)) * self.slab_nbytes
            for nbytes, number in counts.items()
            if number  # a size of 0 comes with no slots
        )

    def has_room(self, extra: Mapping[int, int], nbytes: int = 0) -> bool:
        """Whether ordinary allocations could still get ``extra`` slots by size if free bytes were gathered.

        A negative number is of slots that are given back before. ``nbytes``: to be left beside them.
        """
        needed = nbytes
        for size, number in extra.items():
            if size == self.block_nbytes:
                needed += number * size
            elif number:
                per_slab, live = self.per_slab(size), self.live[size]
                needed += (-(-(live + number) // per_slab) - -(-live // per_slab)) * self.slab_nbytes
        return needed <= self._spare_nbytes

    def room(self, nbytes: int) -> int:
        """Slots of ``nbytes`` that ordinary allocations could still get if free bytes were gathered."""
        spare = self._spare_nbytes
        if spare < 0:
            return 0
        if nbytes == self.block_nbytes:
            return spare // nbytes
        per_slab = self.per_slab(nbytes)
        return spare // self.slab_nbytes * per_slab + -self.live[nbytes] % per_slab

    def allocate(self, nbytes: int, *, urgent: bool = False) -> Slot | None:
        """A slot of ``nbytes`` at the lowest free place, or in the fullest slab of that size.

        ``None`` if there is none unless free bytes are gathered first, or, if not ``urgent``, the reserve is touched.
        """
        if not urgent and not self.room(nbytes):
            return None
        if nbytes == self.block_nbytes:
            return self._take_block() if self._block_places.free or self._gap >= nbytes else None
        if not self._partial.setdefault(nbytes, set()):
            if not self._slab_places.free and self._gap < self.slab_nbytes:
                return None
            self._carve(self._slab_places.take(), nbytes)
        return self._take(nbytes)

    def release(self, slot: Slot) -> None:
        """Frees a slot. Raises ``ArenaError`` for a dead one."""
        if not slot.alive:
            raise ArenaError(f"slot at {slot.address} is not alive")
        slot.alive = False
        self.live[slot.nbytes] -= 1
        self.used_nbytes -= slot.nbytes
        if slot.nbytes == self.block_nbytes:
            number = self._block_place(slot)
            del self._blocks[number]
            self._block_places.give(number)
        else:
            self._release_in_slab(slot)

    def evacuate(self) -> list[tuple[Slot, Slot]]:
        """Gathers free bytes by a few moves: (old slot, new slot) pairs, the new ones allocated.

        The last blocks go to free places, to make room for a slab. If there is none, the last slabs go to free ones, to
        make room for a block; if there is none, either, the sparsest slab that fits into its siblings is emptied. The
        caller moves the bytes and releases the old slots. Empty if no byte can be won.
        """
        return self._move_blocks() or self._empty(self._last_slabs() or self._sparsest())

    def resize(self, nbytes: int) -> None:
        """Has at most ``nbytes`` of memory held, at most those of the start: more at once, less by ``shrink``."""
        number = self.hole.number_for(nbytes)
        self.goal_nbytes = self.hole.usable(number)
        if self.goal_nbytes > self.nbytes:
            self._dig(number)

    def hole_beside(self, nbytes: int) -> tuple[int, int]:
        """Addresses of the hole after ``resize`` if memory grows by it."""
        hole = copy(self.hole)
        hole.place(hole.number_for(nbytes), self._slabs_end, self._blocks_start)
        return hole.span

    @property
    def is_shrinking(self) -> bool:
        """Whether more may be used than was asked for."""
        return self.nbytes > self.goal_nbytes

    @property
    def asked_nbytes(self) -> int:
        """Bytes of memory that were asked for, in whole chunks."""
        return self.hole.held_beside(self.hole.most_beside(self.goal_nbytes))

    def shrink(self) -> int:
        """Takes free bytes between slabs and blocks towards the goal.

        Returns the bytes that it still lacks, wherever they are: 0 if all that is left to do is to gather free ones.
        """
        free = min(self._spare_nbytes, self._gap)
        if free > 0 and self.is_shrinking:
            self._dig(self.hole.most_beside(max(self.goal_nbytes, self.nbytes - free)))
        return max(0, self.nbytes - self.goal_nbytes - max(0, self._spare_nbytes))

    def renewed(self, nbytes: int, reserve_nbytes: int) -> Arena:
        """An empty arena over the same addresses of which at most ``nbytes`` are held."""
        slab, block, chunk = self.slab_nbytes, self.block_nbytes, self.hole.chunk_nbytes
        arena = Arena(self.range_nbytes, slab, reserve_nbytes, block_nbytes=block, chunk_nbytes=chunk)
        arena.resize(nbytes)
        arena.shrink()
        return arena

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless every byte is owned once and every counter agrees."""
        live: Counter[int] = Counter()
        for places, taken in ((self._slab_places, self._slabs), (self._block_places, self._blocks)):
            if sorted([*places.free, *taken]) != list(range(places.extent)):
                raise ArenaError("a place is neither free nor taken, or both")
        if self._gap < 0:
            raise ArenaError("blocks and slabs overlap")
        (start, end), hole = self.hole.span, self.hole
        if hole.number and not self._slabs_end <= start <= end <= self._blocks_start:
            raise ArenaError("slabs or blocks lie in the hole")
        if self.nbytes != hole.usable(hole.number) or self.nbytes < self.goal_nbytes:
            raise ArenaError(f"{self.nbytes} bytes may be used beside a hole of {hole.number} chunks")
        for number, slot in self._blocks.items():
            if slot.nbytes != self.block_nbytes or self._block_place(slot) != number or not slot.alive:
                raise ArenaError(f"slot at {slot.address} disagrees with place {number}")
            live[slot.nbytes] += 1
        for number, slab in self._slabs.items():
            self._check_slab(number, slab)
            live[slab.slot_nbytes] += len(slab.live)
        if live != +self.live:
            raise ArenaError(f"{dict(live)} slots are live, {dict(self.live)} are counted")
        blocks = live[self.block_nbytes] * self.block_nbytes
        if blocks + self._num_packed * self.slab_nbytes != self.packed_nbytes(live):
            raise ArenaError(f"{self._num_packed} slabs are counted as taken")
        if sum(size * number for size, number in live.items()) != self.used_nbytes:
            raise ArenaError(f"{self.used_nbytes} bytes are counted as used")

    def _check_slab(self, number: int, slab: _Slab) -> None:
        size = slab.slot_nbytes
        expected = {number * self.slab_nbytes + i * size for i in range(self.per_slab(size))}
        addresses = list(slab.live) + slab.free
        if len(addresses) != len(expected) or set(addresses) != expected:
            raise ArenaError(f"slab {number} does not own each of its slots once")
        if not slab.live:
            raise ArenaError(f"slab {number} is empty but in use")
        for address, slot in slab.live.items():
            if slot.address != address or slot.nbytes != size or not slot.alive:
                raise ArenaError(f"slot at {address} disagrees with slab {number}")
        if (number in self._partial.get(size, ())) != bool(slab.free):
            raise ArenaError(f"slab {number} is filed wrongly among the partial slabs")

    @property
    def _slabs_end(self) -> int:
        return self._slab_places.extent * self.slab_nbytes

    @property
    def _blocks_start(self) -> int:
        return self.range_nbytes - self._block_places.extent * self.block_nbytes

    @property
    def _gap(self) -> int:
        """Bytes between the last slab and the last block that may be used."""
        slabs, blocks = self._slab_places.extent * self.slab_nbytes, self._block_places.extent * self.block_nbytes
        return self.nbytes - slabs - blocks

    def _dig(self, number: int) -> None:
        """Makes the hole ``number`` chunks, or moves it out of the way of slabs and blocks."""
        self.hole.place(number, self._slabs_end, self._blocks_start)
        self.nbytes = self.hole.usable(number)

    @property
    def _spare_nbytes(self) -> int:
        """Bytes for ordinary allocations when all slots are packed; negative where demotions took of the reserve."""
        taken = self.live[self.block_nbytes] * self.block_nbytes + self._num_packed * self.slab_nbytes
        return self.nbytes - self.reserve_nbytes - taken

    def _block_place(self, slot: Slot) -> int:
        return (self.range_nbytes - slot.address) // self.block_nbytes - 1

    def _take_block(self) -> Slot:
        """The lowest free place of a block. There must be one."""
        number = self._block_places.take()
        slot = self._blocks[number] = Slot(self.range_nbytes - (number + 1) * self.block_nbytes, self.block_nbytes)
        if self.hole.number:
            self._dig(self.hole.number)
        self._count(slot)
        return slot

    def _count(self, slot: Slot) -> None:
        self.live[slot.nbytes] += 1
        self.used_nbytes += slot.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)

    def _carve(self, number: int, nbytes: int) -> None:
        base = number * self.slab_nbytes
        if self.hole.number:
            self._dig(self.hole.number)
        self._slabs[number] = _Slab(nbytes, [base + i * nbytes for i in range(self.per_slab(nbytes))])
        self._file(number, nbytes)

    def _file(self, number: int, nbytes: int) -> None:
        """Notes how full a slab with a free slot is."""
        partial, ranked = self._partial[nbytes], self._ranked.setdefault(nbytes, [])
        partial.add(number)
        heapq.heappush(ranked, self._fullness(number))
        if len(ranked) > 2 * len(partial) + 64:  # most are out of date
            ranked[:] = sorted(map(self._fullness, partial))

    def _fullest(self, nbytes: int) -> int:
        """The fullest slab with a free slot, the lowest if several. There must be one."""
        partial, ranked = self._partial[nbytes], self._ranked[nbytes]
        while ranked[0][1] not in partial or ranked[0] != self._fullness(ranked[0][1]):
            heapq.heappop(ranked)
        return ranked[0][1]

    def _take(self, nbytes: int) -> Slot:
        """A slot of the fullest slab that has a free one. There must be one."""
        number = self._fullest(nbytes)
        slab = self._slabs[number]
        slot = Slot(heapq.heappop(slab.free), nbytes)
        slab.live[slot.address] = slot
        if slab.free:
            heapq.heapreplace(self._ranked[nbytes], self._fullness(number))
        else:
            heapq.heappop(self._ranked[nbytes])
            self._partial[nbytes].discard(number)
        self._num_packed += self.live[nbytes] % self.per_slab(nbytes) == 0
        self._count(slot)
        return slot

    def _release_in_slab(self, slot: Slot) -> None:
        number = slot.address // self.slab_nbytes
        slab = self._slabs[number]
        del slab.live[slot.address]
        self._num_packed -= self.live[slot.nbytes] % self.per_slab(slot.nbytes) == 0
        if slab.live:
            heapq.heappush(slab.free, slot.address)
            self._file(number, slot.nbytes)
        else:
            self._partial[slot.nbytes].discard(number)
            del self._slabs[number]
            self._slab_places.give(number)

    def _move_blocks(self) -> list[tuple[Slot, Slot]]:
        """Allocates free places for the last blocks."""
        moves = list[tuple[Slot, Slot]]()
        for last in self._block_places.last_taken():
            lowest = self._block_places.lowest_free
            if lowest is None or lowest > last or len(moves) * self.block_nbytes >= self.slab_nbytes:
                break
            moves.append((self._blocks[last], self._take_block()))
        return moves

    def _last_slabs(self) -> list[int]:
        """The last slabs, as many as have free places before them and make room for a block."""
        places = self._slab_places
        number = min(len(places.free), max(1, -(-self.block_nbytes // self.slab_nbytes)))
        last = list(islice(places.last_taken(), number))
        before = heapq.nsmallest(number, places.free)
        return [slab for slab, free in zip(last, before, strict=False) if free < slab]

    def _sparsest(self) -> list[int]:
        """Of the slabs that are the sparsest of their size and fit into siblings, the one of fewest live bytes."""
        best: int | None = None
        for size, partial in self._partial.items():
            if len(partial) < 2:
                continue
            sparsest = min(partial, key=lambda i: (len(self._slabs[i].live), -i))
            room = sum(len(self._slabs[i].free) for i in partial if i != sparsest)
            needed = len(self._slabs[sparsest].live)
            if needed <= room and (best is None or needed * size < self._live_nbytes(best)):
                best = sparsest
        return [] if best is None else [best]

    def _empty(self, slabs: list[int]) -> list[tuple[Slot, Slot]]:
        """Allocates other slots for those of ``slabs``: in their siblings, and then in free places."""
        moves = []
        for number in slabs:
            self._partial[self._slabs[number].slot_nbytes].discard(number)
        for number in slabs:
            size, live = self._slabs[number].slot_nbytes, self._slabs[number].live
            for _, old in sorted(live.items()):
                if not self._partial[size]:
                    self._carve(self._slab_places.take(), size)
                moves.append((old, self._take(size)))
        for number in slabs:
            if self._slabs[number].free:
                self._file(number, self._slabs[number].slot_nbytes)
        return moves

    def _fullness(self, number: int) -> tuple[int, int]:
        return -len(self._slabs[number].live), number

    def _live_nbytes(self, number: int) -> int:
        slab = self._slabs[number]
        return len(slab.live) * slab.slot_nbytes
