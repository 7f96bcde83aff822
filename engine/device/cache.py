"""The KV cache: one uint8 tensor, the books of its slots and their owners, and the moves between rungs."""

from __future__ import annotations

import mmap
from collections import Counter
from types import ModuleType

import torch

from ..errors import ConfigError
from ..kv.arena import Arena
from ..kv.block import Block
from ..kv.moves import take_moves
from ..kv.slabs import make_tables
from ..sizes import format_size
from .gpu.mapped import REMEDY, MappedMemory, find_driver
from .gpu.mapped import granule_nbytes as mapped_granule_nbytes
from .layouts import Ladder, LayerGroup
from .memory import check_free, free_memory, memory_or_error
from .mover import MoveBackend, PendingMoves
from .resizable import CpuMemory, FixedMemory, KVMemory, is_fixed

RESIZABLE = "Make an Engine with resizable=True"


class KVCache:
    """KV memory of an engine: its addresses are those of the start. ``tables`` is the scheduler's view of it."""

    def __init__(
        self,
        ladder: Ladder,
        nbytes: int,
        device: torch.device,
        context: int | None = None,
        *,
        resizable: bool = False,
    ):
        """``context``: tokens of the longest request that the model takes. ``resizable``: of a GPU, too."""
        self.ladder, self._context = ladder, context
        self._device, self._resizable = device, resizable
        self.tables = make_tables(ladder.spec, nbytes, granule_nbytes(device, resizable))
        self.take_up()
        self._capacity = 0, (0, 0)  # for a size
        self._is_copying = False  # beside the step before: the next command waits for that
        self.peak: Counter[str] = Counter()  # bytes by kind when the most were in use
        self.fullest: Counter[str] = Counter()  # the same when the most elements were held, at the latest such moment

    @property
    def arena(self) -> Arena:
        """The slots of ``tables``."""
        return self.tables.arena

    @property
    def nbytes(self) -> int:
        """Bytes held on the device; 0 while memory is put away."""
        return self.arena.hole.held_nbytes if len(self.memory) else 0

    @property
    def capacity(self) -> tuple[int, int]:
        """Tokens of one request that fits alone on the first rung, and on the last; searched for once a size.

        If all layers have windows, no length is too much, and it is the model's context.
        """
        if self._capacity[0] != self.arena.goal_nbytes:
            empty = self.tables.renewed()
            first, last = (empty.max_tokens(rung, context=self._context) for rung in (0, self.ladder.last))
            self._capacity = self.arena.goal_nbytes, (first, last)
        return self._capacity[1]

    def take_up(self) -> None:
        """Has memory held, with nothing in it. Raises as ``allocate``."""
        hole = self.arena.hole
        self.backing: KVMemory = allocate(
            hole.range_nbytes, self._device, hole.chunk_nbytes, self._resizable, hole=hole.span
        )
        self.memory = self.backing.tensor

    def put_away(self) -> None:
        """Gives all memory back. The books stay, which must be empty."""
        self.backing = FixedMemory(0, self._device)
        self.memory = self.backing.tensor

    def reset(self) -> None:
        """Forgets every block: the books are made anew, the tensor stays.

        Waits for copies beside the last step, since the slots that they name are handed out again.
        """
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)
        self.tables = self.tables.renewed()

    def check_resize(self, nbytes: int) -> None:
        """Raises ``ConfigError`` for memory of fixed size, ``CapacityError`` if the device has not ``nbytes`` of it."""
        device = self.memory.device
        if is_fixed(self.backing):
            raise ConfigError("KV memory of this engine is fixed", field="size", value=nbytes, remedy=RESIZABLE)
        more = nbytes - self.nbytes
        if more > 0:
            check_free(more, free_memory(device), device, field="size", value=format_size(nbytes))

    def bytes_in_use(self) -> Counter[str]:
        """Live blocks by kind of byte: "codes", "meta" (with all padding), "dense", "state"; and KV "elements"."""
        found: Counter[str] = Counter()
        for group, tables in zip(self.ladder.groups, self.tables.groups, strict=True):
            for number, count in tables.num_blocks.items():
                _count_bytes(found, group, number, count)
        return found

    def blocks_by_group(self) -> list[Counter[str]]:
        """Live blocks of each group by the name of their rung."""
        return [
            +Counter({group.rungs[number].name: count for number, count in tables.num_blocks.items() if number >= 0})
            for group, tables in zip(self.ladder.groups, self.tables.groups, strict=True)
        ]

    def states_by_format(self) -> Counter[str]:
        """Live states, and slots of checkpoints, by the name of their format."""
        found: Counter[str] = Counter()
        for group in self.tables.groups:
            for number, count in group.num_blocks.items():
                if number < 0 and group.spec.slot_of(number).is_state:
                    found[group.spec.name_of(number)] += count
        return +found

    def note_peak(self) -> None:
        """Remembers the bytes in use if they, or the KV elements they hold, are the most so far."""
        found = self.bytes_in_use()
        if total_nbytes(found) > total_nbytes(self.peak):
            self.peak = found
        if found["elements"] >= self.fullest["elements"]:
            self.fullest = found

    def reset_counters(self) -> None:
        """Counts demotions anew; the peak becomes the memory in use."""
        self.tables.store.num_demotions.clear()
        self.tables.store.num_idle_demotions.clear()
        self.peak.clear()
        self.fullest.clear()
        self.note_peak()

    def apply_moves(self, backend: MoveBackend) -> set[Block]:
        """Has ``backend`` carry out the moves in the tables' waves; returns blocks found to hold non-finite values."""
        return self.launch_moves(backend).wait()

    def launch_moves(self, backend: MoveBackend) -> PendingMoves:
        """``apply_moves`` without waiting for the device: the result tells later which blocks are not finite."""
        command, blocks = take_moves(self.tables)
        has_copies = bool(command.written or command.fetched)
        if not (command.waves or command.fresh or has_copies or self._is_copying):
            return PendingMoves([], [])
        self._is_copying = has_copies
        checks = backend.move(command)
        self.note_peak()
        return PendingMoves(blocks, checks)


def _count_bytes(found: Counter[str], group: LayerGroup, number: int, count: int) -> None:
    """Adds ``count`` blocks on a rung of ``group``, or slots of requests, to ``found``."""
    if number < 0:
        slot = group.spec.slot_of(number)
        kind = "state" if slot.is_state else "dense" if slot.num_tokens else "meta"
        found[kind] += count * group.spec.nbytes(number)
        found["elements"] += count * slot.num_elements
    else:
        rung = group.rungs[number]
        found["codes"] += count * rung.codes_nbytes
        found["meta"] += count * rung.meta_nbytes
        found["dense"] += count * rung.dense_nbytes
        found["elements"] += count * rung.num_elements


def allocate(
    nbytes: int,
    device: torch.device,
    chunk_nbytes: int,
    resizable: bool = False,
    *,
    hole: tuple[int, int] = (0, 0),
) -> KVMemory:
    """KV memory of [nbytes], which may be given back in chunks on a CPU, and on a GPU if it is to be ``resizable``.

    ``hole``: addresses without memory from the beginning on; pages of a CPU have none anyhow until they are written.
    Raises ``CapacityError`` if the system does not give it, ``ConfigError`` for a GPU whose memory cannot be mapped.
    """
    message = f"the system does not give so much memory on {device}"
    with memory_or_error(message, field="kv_memory", value=format_size(nbytes), remedy="Lower kv_memory"):
        if device.type == "cpu":
            return CpuMemory(nbytes)
        if not resizable:
            return FixedMemory(nbytes, device)
        return MappedMemory(nbytes, chunk_nbytes, device, _driver(device), hole)


def granule_nbytes(device: torch.device, resizable: bool = False) -> int:
    """Bytes of which a device gives and takes KV memory in multiples. Raises ``ConfigError`` as ``allocate``."""
    if device.type == "cpu" or not resizable:
        return mmap.PAGESIZE
    return mapped_granule_nbytes(_driver(device), device)


def _driver(device: torch.device) -> ModuleType:
    driver = find_driver(device)
    if driver is None:
        raise ConfigError(f"memory of {device} cannot be mapped", field="resizable", value=True, remedy=REMEDY)
    return driver


def total_nbytes(found: Counter[str]) -> int:
    """All bytes of ``KVCache.bytes_in_use``."""
    return found["codes"] + found["meta"] + found["dense"] + found["state"]
