"""The arena's books: which bytes of the one KV tensor are a slot of which size. No tensors, no torch.

The arena is cut into slabs of equal size. A slab is given to one slot size and carved into equal slots; an empty
slab returns to the common pool. The fullest slab is filled first, and a sparse slab can be emptied into its siblings
(`evacuate`), so free bytes can always be turned into free slabs: `room` counts as if that had been done.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import QKVError


class ArenaError(QKVError):
    """The arena's books contradict themselves, or a dead slot was used: a bug in the engine."""


@dataclass(slots=True, eq=False)
class Slot:
    """``nbytes`` bytes at ``address`` of the arena while ``alive``. A freed slot is never revived."""

    address: int
    nbytes: int
    alive: bool = True


@dataclass(slots=True, eq=False)
class _Slab:
    slot_nbytes: int
    free: list[int]  # heap of addresses
    live: dict[int, Slot] = field(default_factory=dict)  # by address


class _Pool:
    """Numbers of free slabs, lowest first. Of the slabs never taken only the first number is kept."""

    def __init__(self, num_slabs: int):
        self._num_slabs, self._untouched = num_slabs, 0
        self._returned: list[int] = []  # heap

    def __len__(self) -> int:
        return len(self._returned) + self._num_slabs - self._untouched

    def __iter__(self) -> Iterator[int]:
        yield from self._returned
        yield from range(self._untouched, self._num_slabs)

    def take(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._untouched += 1
        return self._untouched - 1

    def give(self, number: int) -> None:
        heapq.heappush(self._returned, number)


class Arena:
    """Slots in ``nbytes`` bytes, in slabs of ``slab_nbytes``. Owned by the KV cache for the engine's life.

    ``reserve`` slabs are kept out of ordinary allocations, so that a demotion always finds a place to write.
    """

    def __init__(self, nbytes: int, slab_nbytes: int, reserve: int = 0):
        self.slab_nbytes = slab_nbytes
        self.num_slabs = nbytes // slab_nbytes
        self.nbytes = self.num_slabs * slab_nbytes
        self.reserve = reserve
        self._slabs: dict[int, _Slab] = {}  # slabs in use, by number
        self._pool = _Pool(self.num_slabs)
        self._partial: dict[int, set[int]] = {}  # slot size -> slabs with a free slot
        self._ranked: dict[int, list[tuple[int, int]]] = {}  # size -> heap of (-live slots, slab), some out of date
        self.live: Counter[int] = Counter()  # slot size -> live slots
        self._num_packed = 0  # slabs that all live slots would take if packed
        self.used_nbytes = 0
        self.peak_nbytes = 0

    def per_slab(self, nbytes: int) -> int:
        return self.slab_nbytes // nbytes

    def slabs_for(self, counts: Mapping[int, int]) -> int:
        """Slabs that ``counts``, slots by size, take when they are packed."""
        return sum(-(-number // self.per_slab(nbytes)) for nbytes, number in counts.items())

    def has_room(self, extra: Mapping[int, int]) -> bool:
        """Whether ordinary allocations could still get ``extra`` slots by size if sparse slabs were emptied."""
        slabs = self._num_packed
        for nbytes, number in extra.items():
            if number:  # a size of 0 comes with no slots
                per_slab, live = self.per_slab(nbytes), self.live[nbytes]
                slabs += -(-(live + number) // per_slab) - -(-live // per_slab)
        return slabs <= self.num_slabs - self.reserve

    def room(self, nbytes: int) -> int:
        """Slots of ``nbytes`` that ordinary allocations could still get if sparse slabs were emptied."""
        per_slab, live = self.slab_nbytes // nbytes, self.live[nbytes]
        others = self._num_packed - -(-live // per_slab)
        return max(0, (self.num_slabs - self.reserve - others) * per_slab - live)

    def allocate(self, nbytes: int, *, urgent: bool = False) -> Slot | None:
        """A slot of ``nbytes`` in the fullest slab of that size, lowest address first.

        ``None`` if there is none without emptying a slab first, or, unless ``urgent``, without touching the reserve.
        """
        if not urgent and not self.room(nbytes):
            return None
        partial = self._partial.setdefault(nbytes, set())
        if not partial:
            if len(self._pool) <= (0 if urgent else self.reserve):
                return None
            self._carve(self._pool.take(), nbytes)
        return self._take(nbytes)

    def release(self, slot: Slot) -> None:
        """Frees a slot. Raises ``ArenaError`` for a dead one."""
        number = slot.address // self.slab_nbytes
        slab = self._slabs.get(number)
        if slab is None or slab.live.get(slot.address) is not slot:
            raise ArenaError(f"slot at {slot.address} is not alive")
        del slab.live[slot.address]
        slot.alive = False
        self.live[slot.nbytes] -= 1
        self._num_packed -= self.live[slot.nbytes] % self.per_slab(slot.nbytes) == 0
        self.used_nbytes -= slot.nbytes
        if slab.live:
            heapq.heappush(slab.free, slot.address)
            self._file(number, slot.nbytes)
        else:
            self._partial[slot.nbytes].discard(number)
            del self._slabs[number]
            self._pool.give(number)

    def evacuate(self) -> list[tuple[Slot, Slot]]:
        """Empties the sparsest slab that fits into its siblings: (old slot, new slot) pairs, the new ones allocated.

        The caller moves the bytes and releases the old slots, which returns the slab. Empty if no slab can be won.
        """
        best: int | None = None
        for size, partial in self._partial.items():
            if len(partial) < 2:
                continue
            sparsest = min(partial, key=lambda i: (len(self._slabs[i].live), -i))
            room = sum(len(self._slabs[i].free) for i in partial if i != sparsest)
            needed = len(self._slabs[sparsest].live)
            if needed <= room and (best is None or needed * size < self._live_nbytes(best)):
                best = sparsest
        if best is None:
            return []
        size, live = self._slabs[best].slot_nbytes, self._slabs[best].live
        self._partial[size].remove(best)
        moves = [(old, self._take(size)) for _, old in sorted(live.items())]
        self._file(best, size)
        return moves

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless every byte is owned once and every counter agrees."""
        live: Counter[int] = Counter()
        if sorted([*self._pool, *self._slabs]) != list(range(self.num_slabs)):
            raise ArenaError("a slab is neither pooled nor given to a size, or both")
        for number, slab in self._slabs.items():
            size = slab.slot_nbytes
            expected = {number * self.slab_nbytes + i * size for i in range(self.per_slab(size))}
            addresses = list(slab.live) + slab.free
            if len(addresses) != len(expected) or set(addresses) != expected:
                raise ArenaError(f"slab {number} does not own each of its slots once")
            if not slab.live:
                raise ArenaError(f"slab {number} is empty but not in the pool")
            for address, slot in slab.live.items():
                if slot.address != address or slot.nbytes != size or not slot.alive:
                    raise ArenaError(f"slot at {address} disagrees with slab {number}")
            if (number in self._partial.get(size, ())) != bool(slab.free):
                raise ArenaError(f"slab {number} is filed wrongly among the partial slabs")
            live[size] += len(slab.live)
        if live != +self.live:
            raise ArenaError(f"{dict(live)} slots are live, {dict(self.live)} are counted")
        if self._num_packed != self.slabs_for(live):
            raise ArenaError(f"{self._num_packed} slabs are counted as taken")
        if sum(size * number for size, number in live.items()) != self.used_nbytes:
            raise ArenaError(f"{self.used_nbytes} bytes are counted as used")

    def _carve(self, number: int, nbytes: int) -> None:
        base = number * self.slab_nbytes
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
        self.live[nbytes] += 1
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return slot

    def _fullness(self, number: int) -> tuple[int, int]:
        return -len(self._slabs[number].live), number

    def _live_nbytes(self, number: int) -> int:
        slab = self._slabs[number]
        return len(slab.live) * slab.slot_nbytes
