"""The arena's books: which bytes of the one KV tensor are a slot of which size. No tensors, no torch.

The arena is cut into slabs of equal size. A slab is given to one slot size and carved into equal slots; an empty
slab returns to the common pool. The fullest slab is filled first, so that sparse slabs run empty by themselves.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ..errors import QKVError


class ArenaError(QKVError):
    """The arena's books contradict themselves, or a dead slot was used: a bug in the engine."""


@dataclass(slots=True, eq=False)
class Slot:
    """``nbytes`` bytes at ``address`` of the arena, alive while ``refs`` > 0. A freed slot is never revived."""

    address: int
    nbytes: int
    refs: int = 1


@dataclass(slots=True, eq=False)
class _Slab:
    base: int
    slot_nbytes: int = 0  # 0: in the common pool
    live: dict[int, Slot] = field(default_factory=dict)  # by address
    free: list[int] = field(default_factory=list)  # heap of addresses

    @property
    def num_slots(self) -> int:
        return len(self.live) + len(self.free)


class Arena:
    """Slots in ``nbytes`` bytes, in slabs of ``slab_nbytes``. Owned by the KV cache for the engine's life."""

    def __init__(self, nbytes: int, slab_nbytes: int):
        self.slab_nbytes = slab_nbytes
        self.num_slabs = nbytes // slab_nbytes
        self.nbytes = self.num_slabs * slab_nbytes
        self._slabs = [_Slab(i * slab_nbytes) for i in range(self.num_slabs)]
        self._pool = list(range(self.num_slabs))  # heap of slab numbers that belong to no size
        self._partial: dict[int, set[int]] = {}  # slot size -> slabs with a free slot
        self.used_nbytes = 0
        self.peak_nbytes = 0

    def num_free(self, nbytes: int) -> int:
        """How many slots of ``nbytes`` could be allocated now."""
        partial = sum(len(self._slabs[i].free) for i in self._partial.get(nbytes, ()))
        return partial + len(self._pool) * (self.slab_nbytes // nbytes)

    def allocate(self, nbytes: int) -> Slot | None:
        """A slot of ``nbytes`` in the fullest slab of that size (lowest address first), or ``None`` if none is free."""
        partial = self._partial.setdefault(nbytes, set())
        if not partial:
            if not self._pool:
                return None
            self._carve(heapq.heappop(self._pool), nbytes)
        number = max(partial, key=lambda i: (len(self._slabs[i].live), -i))
        slab = self._slabs[number]
        slot = Slot(heapq.heappop(slab.free), nbytes)
        slab.live[slot.address] = slot
        if not slab.free:
            partial.discard(number)
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return slot

    def retain(self, slot: Slot) -> None:
        """One more owner. Raises ``ArenaError`` for a dead slot."""
        self._check_alive(slot)
        slot.refs += 1

    def release(self, slot: Slot) -> None:
        """One owner less; the last one frees the slot. Raises ``ArenaError`` for a dead slot."""
        self._check_alive(slot)
        slot.refs -= 1
        if slot.refs:
            return
        number = slot.address // self.slab_nbytes
        slab = self._slabs[number]
        del slab.live[slot.address]
        self.used_nbytes -= slot.nbytes
        if slab.live:
            heapq.heappush(slab.free, slot.address)
            self._partial[slot.nbytes].add(number)
        else:
            self._partial[slot.nbytes].discard(number)
            slab.slot_nbytes, slab.free = 0, []
            heapq.heappush(self._pool, number)

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless every byte is owned once and every counter agrees."""
        used = 0
        for number, slab in enumerate(self._slabs):
            pooled = number in self._pool
            if pooled != (slab.slot_nbytes == 0) or (pooled and (slab.live or slab.free)):
                raise ArenaError(f"slab {number} is both pooled and in use")
            if pooled:
                continue
            size = slab.slot_nbytes
            expected = {slab.base + i * size for i in range(self.slab_nbytes // size)}
            addresses = list(slab.live) + slab.free
            if len(addresses) != len(expected) or set(addresses) != expected:
                raise ArenaError(f"slab {number} does not own each of its slots once")
            if not slab.live:
                raise ArenaError(f"slab {number} is empty but not in the pool")
            for address, slot in slab.live.items():
                if slot.address != address or slot.nbytes != size or slot.refs < 1:
                    raise ArenaError(f"slot at {address} disagrees with slab {number}")
            if (number in self._partial.get(size, ())) != bool(slab.free):
                raise ArenaError(f"slab {number} is filed wrongly among the partial slabs")
            used += len(slab.live) * size
        if used != self.used_nbytes:
            raise ArenaError(f"{used} bytes are live, {self.used_nbytes} are counted")

    def _carve(self, number: int, nbytes: int) -> None:
        slab = self._slabs[number]
        slab.slot_nbytes = nbytes
        slab.free = [slab.base + i * nbytes for i in range(self.slab_nbytes // nbytes)]
        self._partial[nbytes].add(number)

    def _check_alive(self, slot: Slot) -> None:
        live = self._slabs[slot.address // self.slab_nbytes].live.get(slot.address)
        if live is not slot:
            raise ArenaError(f"slot at {slot.address} is not alive")
