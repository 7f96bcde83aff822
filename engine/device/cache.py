"""The KV cache: one uint8 tensor, the books of its slots and their owners, and the moves between rungs."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import torch
from torch import Tensor

from ..config import BLOCK_TOKENS
from ..errors import CapacityError
from ..kv.arena import Arena
from ..kv.block import Block, slot_rung
from ..kv.moves import take_moves
from ..kv.table import BlockTables, reserve_nbytes
from ..sizes import format_least, format_size
from .ladder import Ladder
from .memory import memory_or_error
from .mover import MoveBackend, PendingMoves

MAX_SLAB_BLOCKS = (
    16  # most widest blocks of a slab: larger ones would save little, and cost copies where one is emptied
)


class KVCache:
    """KV memory of an engine: allocated once at start, never grown. ``tables`` is the scheduler's view of it."""

    def __init__(self, ladder: Ladder, nbytes: int, device: torch.device):
        least = least_nbytes(ladder)
        if nbytes < least:
            raise CapacityError(
                f"no room for one block of {BLOCK_TOKENS} tokens, the slots of its request and the reserve",
                field="kv_memory",
                value=format_size(nbytes),
                remedy=f"Give at least {format_least(least)}",
            )
        self.ladder = ladder
        self.arena = make_arena(ladder, nbytes)
        self.tables = BlockTables(self.arena, ladder)
        self.memory = allocate(self.arena.nbytes, device)
        self.peak: Counter[str] = Counter()  # bytes by kind when the most were in use
        self.fullest: Counter[str] = Counter()  # the same when the most elements were held, at the latest such moment

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self.memory.nbytes

    @cached_property
    def capacity(self) -> tuple[int, int]:
        """Tokens of one request that fits alone on the first rung, and on the last; searched for once."""
        return self.tables.max_tokens(0), self.tables.max_tokens(len(self.ladder.rungs) - 1)

    def reset(self) -> None:
        """Forgets every block: the books are made anew, the tensor stays."""
        self.arena = make_arena(self.ladder, self.arena.nbytes)
        self.tables = BlockTables(self.arena, self.ladder)

    def bytes_in_use(self) -> Counter[str]:
        """Live blocks by kind of byte, "codes", "meta" (with all padding) and "dense", and their KV "elements"."""
        found: Counter[str] = Counter()
        for number, count in self.tables.num_blocks.items():
            if number < 0:
                slot = self.ladder.slots[slot_rung(number)]
                found["dense" if slot.num_tokens else "meta"] += count * slot.nbytes
                found["elements"] += count * slot.num_elements
            else:
                rung = self.ladder.rungs[number]
                found["codes"] += count * rung.codes_nbytes
                found["meta"] += count * rung.meta_nbytes
                found["dense"] += count * rung.dense_nbytes
                found["elements"] += count * rung.num_elements
        return found

    def note_peak(self) -> None:
        """Remembers the bytes in use if they, or the KV elements they hold, are the most so far."""
        found = self.bytes_in_use()
        if total_nbytes(found) > total_nbytes(self.peak):
            self.peak = found
        if found["elements"] >= self.fullest["elements"]:
            self.fullest = found

    def reset_counters(self) -> None:
        """Counts demotions anew; the peak becomes the memory in use."""
        self.tables.num_demotions.clear()
        self.peak.clear()
        self.fullest.clear()
        self.note_peak()

    def apply_moves(self, backend: MoveBackend) -> set[Block]:
        """Has ``backend`` carry out the moves in the tables' waves; returns blocks found to hold non-finite values."""
        return self.launch_moves(backend).wait()

    def launch_moves(self, backend: MoveBackend) -> PendingMoves:
        """``apply_moves`` without waiting for the device: the result tells later which blocks are not finite."""
        command, blocks = take_moves(self.tables)
        if not command.waves and not command.fresh:
            return PendingMoves([], [])
        checks = backend.move(command)
        self.note_peak()
        return PendingMoves(blocks, checks)


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """KV memory [nbytes] uint8, undefined. Raises ``CapacityError`` if the system does not give it."""
    message = f"the system does not give so much memory on {device}"
    with memory_or_error(message, field="kv_memory", value=format_size(nbytes), remedy="Lower kv_memory"):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def total_nbytes(found: Counter[str]) -> int:
    """All bytes of ``KVCache.bytes_in_use``."""
    return found["codes"] + found["meta"] + found["dense"]


def make_arena(ladder: Ladder, nbytes: int) -> Arena:
    """An arena for blocks of ``ladder`` in ``nbytes``, aligned, with the slabs that waste least.

    ``nbytes``: at least ``least_nbytes``.
    """
    block, narrow = ladder.widest.block_nbytes, _slab_sizes(ladder)
    if not narrow:
        return Arena(nbytes // block * block, block, block_nbytes=block)
    nbytes -= nbytes % ladder.align
    fitting = [slab for slab in _slabs(ladder) if _least_with(ladder, slab) <= nbytes]
    slab = min(fitting, key=lambda slab: (_expected_loss(ladder, slab, nbytes), slab))
    return Arena(nbytes, slab, _reserve(ladder, slab), block_nbytes=block)


def least_nbytes(ladder: Ladder) -> int:
    """The least memory in which a request alone has a block on each rung beside an open one."""
    if not _slab_sizes(ladder):
        return ladder.widest.block_nbytes * (1 + len(ladder.slots))
    return min(_least_with(ladder, slab) for slab in _slabs(ladder))


def _slab_sizes(ladder: Ladder) -> set[int]:
    """Bytes of the slots that lie in slabs: all but those of blocks on the widest rung."""
    sizes = {rung.block_nbytes for rung in ladder.rungs} | {slot.nbytes for slot in ladder.slots}
    return sizes - {ladder.widest.block_nbytes}


def _slabs(ladder: Ladder) -> list[int]:
    """Sizes of a slab that may waste least: a few slots of some size, of at most ``MAX_SLAB_BLOCKS`` blocks.

    A slab is no larger than the blocks that fill it when they step down, so that steps down never take more bytes.
    """
    block, narrow = ladder.widest.block_nbytes, _slab_sizes(ladder)
    most, rungs = MAX_SLAB_BLOCKS * block, [rung.block_nbytes for rung in ladder.rungs[1:]]
    sizes = (
        -(-number * size // ladder.align) * ladder.align
        for size in narrow | {block}
        for number in range(-(-max(narrow) // size), most // size + 1)
    )
    return [slab for slab in sizes if not rungs or slab // rungs[0] * block >= slab]


def _reserve(ladder: Ladder, slab: int) -> int:
    return reserve_nbytes([rung.block_nbytes for rung in ladder.rungs], slab)


def _least_with(ladder: Ladder, slab: int) -> int:
    block = ladder.widest.block_nbytes
    slots = sum(block if slot.nbytes == block else slab for slot in ladder.slots)
    return block + slots + slab * (len(ladder.rungs) > 1) + _reserve(ladder, slab)


def _expected_loss(ladder: Ladder, slab: int, nbytes: int) -> float:
    """Bytes that hold no KV: the reserve, half of what a slab of each size may leave free, and the mean of rests.

    Small slabs leave rests, large ones a large reserve.
    """
    halves = sum(slab - slab // (slab // size) for size in _slab_sizes(ladder)) / 2
    rests = [1 - slab // rung.block_nbytes * rung.block_nbytes / slab for rung in ladder.rungs[1:]]
    return _reserve(ladder, slab) + halves + nbytes * sum(rests) / max(1, len(rests))
