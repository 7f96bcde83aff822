"""Block tables: which slots hold the KV of which request, and how many more would fit. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import BLOCK_TOKENS
from .arena import Arena, ArenaError, Slot


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in token order."""

    blocks: list[Slot] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens the blocks have room for."""
        return len(self.blocks) * BLOCK_TOKENS


class BlockTables:
    """Gives requests blocks of the arena and takes them back. What the scheduler sees of KV memory."""

    def __init__(self, arena: Arena, block_nbytes: int):
        self.arena = arena
        self.block_nbytes = block_nbytes
        self._tables: dict[str, BlockTable] = {}
        self._fresh: list[Slot] = []

    def __getitem__(self, request_id: str) -> BlockTable:
        return self._tables[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def num_total_blocks(self) -> int:
        return self.arena.num_slabs * (self.arena.slab_nbytes // self.block_nbytes)

    @property
    def num_free_blocks(self) -> int:
        return self.arena.num_free(self.block_nbytes)

    @property
    def capacity(self) -> int:
        """Tokens that fit in all."""
        return self.num_total_blocks * BLOCK_TOKENS

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_TOKENS)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Makes room for the first ``num_tokens`` tokens of a request; all or nothing."""
        table = self._tables.get(request_id)
        missing = self.num_blocks(num_tokens) - (len(table.blocks) if table else 0)
        if missing <= 0:
            return True
        if missing > self.num_free_blocks:
            return False
        if table is None:
            table = self._tables[request_id] = BlockTable()
        for _ in range(missing):
            slot = self.arena.allocate(self.block_nbytes)
            if slot is None:
                raise ArenaError("the arena has fewer free slots than it counts")
            table.blocks.append(slot)
            self._fresh.append(slot)
        return True

    def take_fresh(self) -> list[Slot]:
        """Live slots handed out since the last call; what they hold is somebody else's old bytes."""
        fresh = [slot for slot in self._fresh if slot.refs]
        self._fresh.clear()
        return fresh

    def release(self, request_id: str) -> None:
        """Takes all blocks of a request back; nothing happens if it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            for slot in table.blocks:
                self.arena.release(slot)

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless the tables own every live slot as often as it is referenced."""
        self.arena.check_integrity()
        owners: dict[int, int] = {}
        for table in self._tables.values():
            for slot in table.blocks:
                owners[id(slot)] = owners.get(id(slot), 0) + 1
                if owners[id(slot)] > slot.refs:
                    raise ArenaError(f"slot at {slot.address} has more owners than references")
        total = sum(slot.nbytes for table in self._tables.values() for slot in table.blocks if slot.refs == 1)
        shared = {id(s): s.nbytes for t in self._tables.values() for s in t.blocks if s.refs > 1}
        if total + sum(shared.values()) != self.arena.used_nbytes:
            raise ArenaError("live slots belong to no table")
