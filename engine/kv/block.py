"""Parts of the block tables: a block, the table of a request, moves, and the journal of changes. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from .arena import Slot
from .bank import Bank, Centres, Mining


def slot_rung(index: int) -> int:
    """The rung of place ``index`` among those of a request's slots, below all of the ladder's; its own inverse.

    A slot has a place for each of its rungs, the narrowest first: most have one, so that it is the slot's index.
    """
    return -1 - index


class Standing(Protocol):
    """What stands on a rung: a block, or a copy of one."""

    @property
    def rung(self) -> int: ...


class Block(msgspec.Struct, eq=False):
    """The KV of ``block_tokens`` tokens, or a request's slot beside them, on one rung, shared by ``refs`` owners.

    Of the layers of one ``group``, whose rungs ``rung`` and floors are. Owners are requests and the prefix cache.
    ``floor`` is the narrowest rung that all of these requests allow; ``holders`` has the floor of each, sorted. One
    object a block: all owners see it step down. ``number`` is unique among live blocks of the group.
    """

    slot: Slot
    group: int
    rung: int
    floor: int
    number: int
    refs: int = 1
    holders: tuple[int, ...] = ()
    bank: Bank | None = None  # of its request, if it has one; such a block is never shared

    @property
    def is_shared(self) -> bool:
        """Whether several requests hold the block."""
        return len(self.holders) > 1

    @property
    def is_settled(self) -> bool:
        """Whether the block can step down no further."""
        return self.rung >= self.floor


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request and group in token order, and the request's slots, in the order of the group's.

    ``first``: leading blocks that were given back, or never taken, since no token sees them any more; ``blocks`` are
    those behind them.
    """

    floor: int
    num_prompt_tokens: int
    slots: list[Block] = field(default_factory=list)
    num_slots: int = 0  # slots that were taken, and the sink's where it is out of sight
    first: int = 0
    blocks: list[Block] = field(default_factory=list)
    num_settled: int = 0  # leading ones of ``blocks`` on their floors, as of ``floor_epoch``
    floor_epoch: int = 0
    bank: Bank | None = None  # made with the slots, if the ladder has patterns
    slot_rungs: list[int] = field(default_factory=list)  # on which its slots begin
    slot_floors: tuple[int, ...] = ()  # the narrowest ones that the request allows
    num_settled_states: int = 0  # leading ones of its states on their floors

    def __iter__(self) -> Iterator[Block]:
        yield from self.slots
        yield from self.blocks

    def count_settled(self, floor_epoch: int) -> int:
        """The number of leading blocks that are settled, counted from the first again after a lift of floors."""
        if self.floor_epoch != floor_epoch:
            self.num_settled, self.floor_epoch = 0, floor_epoch
        while self.num_settled < len(self.blocks) and self.blocks[self.num_settled].is_settled:
            self.num_settled += 1
        return self.num_settled


@dataclass(slots=True)
class Journal:
    """Changes in the tables since the keeper of their copy last looked."""

    blocks: list[Block] = field(default_factory=list)  # made or moved
    grown: list[str] = field(default_factory=list)  # requests whose tables got more blocks
    opened: bool = False  # whether a table was opened, perhaps for a known request


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to be rewritten: ``block`` goes from address ``src`` on rung ``old`` to ``dst`` on rung ``new``.

    ``bank``: address of the request's bank if the block is sealed under one. ``num_windows``: windows after the prompt
    whose patterns the block may choose from. ``mining``: the tokens from which the bank is mined first. ``centres``:
    the windows that add patterns to it then.
    """

    block: Block
    src: int
    dst: int
    old: int
    new: int
    bank: int | None = None
    num_windows: int = 0
    mining: Mining | None = None
    centres: Centres | None = None

    @classmethod
    def down(cls, block: Block, slot: Slot, rung: int) -> Move:
        """The move of ``block`` to ``slot`` on a narrower ``rung``; a request's first seal has its bank mined."""
        where = block, block.slot.address, slot.address, block.rung, rung
        if block.rung or block.bank is None:
            return cls(*where)
        bank, num_windows = block.bank, block.bank.windows_until(block)
        address = bank.block.slot.address
        return cls(*where, address, num_windows, bank.mine(), bank.add_centres(num_windows))
