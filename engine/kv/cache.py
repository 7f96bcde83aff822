"""The KV cache: one uint8 tensor, the books of its slots and their owners, and the moves between rungs."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import torch

from ..config import BLOCK_TOKENS
from ..errors import CapacityError
from ..sizes import format_least, format_size
from .arena import Arena
from .block import Block, slot_rung
from .ladder import Ladder
from .mover import MoveBackend, Mover, PendingMoves
from .moves import take_moves
from .table import BlockTables, num_reserve_slabs

MAX_SLAB_BLOCKS = 16  # most widest blocks of a slab: more would enlarge the reserve, fewer leave unused rests


class KVCache:
    """KV memory of an engine: allocated once at start, never grown. ``tables`` is the scheduler's view of it."""

    def __init__(self, ladder: Ladder, nbytes: int, device: torch.device, *, cuda_graphs: bool = True):
        # The smallest slabs hold a widest block: one for the open block, one for each slot, one for narrower blocks.
        num_slabs = 1 + len(ladder.slots) + (len(ladder.rungs) > 1) + num_reserve_slabs(len(ladder.rungs))
        least = num_slabs * ladder.widest.block_nbytes
        if nbytes < least:
            raise CapacityError(
                f"no room for one block of {BLOCK_TOKENS} tokens, the slots of its request and the reserve",
                field="kv_memory",
                value=format_size(nbytes),
                remedy=f"Give at least {format_least(least)}",
            )
        self.ladder = ladder
        self.arena = _best_arena(ladder, nbytes)
        self.tables = BlockTables(self.arena, ladder)
        self.memory = torch.empty(self.arena.nbytes, dtype=torch.uint8, device=device)
        self.peak: Counter[str] = Counter()  # bytes by kind when the most were in use
        self.fullest: Counter[str] = Counter()  # the same when the most elements were held, at the latest such moment
        self.mover: MoveBackend = Mover(self.memory, ladder, cuda_graphs)

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
        self.arena = Arena(self.arena.nbytes, self.arena.slab_nbytes, num_reserve_slabs(len(self.ladder.rungs)))
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

    def apply_moves(self) -> set[Block]:
        """Carries out the moves in the tables' waves; returns blocks found to hold non-finite values."""
        return self.launch_moves().wait()

    def launch_moves(self) -> PendingMoves:
        """``apply_moves`` without waiting for the device: the result tells later which blocks are not finite."""
        command, blocks = take_moves(self.tables)
        if not command.waves and not command.fresh:
            return PendingMoves([], [])
        checks = self.mover.execute(command)
        self.note_peak()
        return PendingMoves(blocks, checks)


def total_nbytes(found: Counter[str]) -> int:
    """All bytes of ``KVCache.bytes_in_use``."""
    return found["codes"] + found["meta"] + found["dense"]


def _best_arena(ladder: Ladder, nbytes: int) -> Arena:
    """The arena whose slabs of whole widest blocks waste least: small ones leave rests, large ones a large reserve.

    Waste is least where the longest requests, one alone on each rung, take the most bytes in sum.
    """

    def make(slab_blocks: int) -> Arena:
        return Arena(nbytes, slab_blocks * block_nbytes, num_reserve_slabs(len(ladder.rungs)))

    def useful(slab_blocks: int) -> int:
        tables = BlockTables(make(slab_blocks), ladder)
        return sum(tables.max_tokens(i) * rung.block_nbytes for i, rung in enumerate(ladder.rungs))

    block_nbytes = ladder.widest.block_nbytes
    most = min(MAX_SLAB_BLOCKS, nbytes // block_nbytes)
    return make(max(range(1, most + 1), key=lambda slab_blocks: (useful(slab_blocks), slab_blocks)))
