"""Parts of the block tables: a block, the table of a request, and the notes of what changed. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .arena import Slot
from .bank import Bank, Mining


def slot_rung(index: int) -> int:
    """The rung of slot ``index`` of a request, below all of the ladder's; the function is its own inverse."""
    return -1 - index


@dataclass(slots=True, eq=False)
class Block:
    """128 tokens of KV, or a request's slot beside them, on one rung, shared by ``refs`` owners.

    Owners are requests and the prefix cache. ``floor`` is the narrowest rung that all of these requests allow;
    ``holders`` has the floor of each, sorted. One object a block: whoever shares it sees it step down. ``number`` is
    its own while it lives.
    """

    slot: Slot
    rung: int
    floor: int
    number: int
    refs: int = 1
    holders: list[int] = field(default_factory=list)
    bank: Bank | None = None  # of its request, which no other shares

    @property
    def is_shared(self) -> bool:
        """Whether several requests hold it."""
        return len(self.holders) > 1


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request in token order, and its slots beside them, in the order of the ladder's."""

    floor: int
    num_prompt_tokens: int
    slots: list[Block] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_settled: int = 0  # leading blocks that can step down no further, as of so many lifts of floors
    floor_epoch: int = 0
    bank: Bank | None = None  # once it has slots, if the ladder has patterns

    def __iter__(self) -> Iterator[Block]:
        yield from self.slots
        yield from self.blocks


@dataclass(slots=True)
class Journal:
    """What changed in the tables since the one who keeps a copy of them last looked."""

    blocks: list[Block] = field(default_factory=list)  # made or moved
    grown: list[str] = field(default_factory=list)  # requests whose tables got blocks
    opened: bool = False  # whether a request may have another table than before


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to be rewritten: ``block`` goes from address ``src`` on rung ``old`` to ``dst`` on rung ``new``.

    ``bank`` is the address of the request's bank, if the block is sealed under one, and ``mining`` what to mine it from
    before.
    """

    block: Block
    src: int
    dst: int
    old: int
    new: int
    bank: int | None = None
    mining: Mining | None = None
