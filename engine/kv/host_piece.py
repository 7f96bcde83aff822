"""Parts of the host tier: copies of blocks, pieces of the same tokens, and what is under way. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .arena import Slot
from .block import Block
from .moves import HostCopy


@dataclass(slots=True, eq=False)
class HostBlock:
    """The copy of a block of a group on its ``rung``, in a ``slot`` of host memory.

    ``command``: number of the command that brings its bytes. ``source``: the block that is copied, until that command
    has ended well; None from then on.
    """

    slot: Slot
    group: int
    rung: int
    command: int
    source: Block | None


@dataclass(slots=True, eq=False)
class HostPiece:
    """Copies of the blocks of the same ``tokens``, which follow those of ``parent``; by group, None: there is none.

    ``tenant``: whose share they count in.
    """

    key: bytes
    parent: bytes
    tokens: array[int]
    blocks: list[HostBlock | None]
    tenant: str = ""

    def held(self) -> Iterator[HostBlock]:
        """The copies that there are."""
        return (block for block in self.blocks if block is not None)


class Fetch(NamedTuple):
    """A ``block`` of KV memory that gets the bytes of ``copy``, one of ``piece``, by a command of that number."""

    block: Block
    piece: HostPiece
    copy: HostBlock
    command: int


class Copies(NamedTuple):
    """Copies of one command: ``outs`` by the number of waves before, and those beside the step that follows."""

    outs: dict[int, list[HostCopy]]
    written: Sequence[HostCopy]
    fetched: Sequence[HostCopy]


class HostStats(NamedTuple):
    """Host memory now, and bytes and tokens since the counters were reset.

    ``out_nbytes`` left with their blocks, ``written_nbytes`` ahead of need, ``fetched_nbytes`` came back;
    ``dropped_nbytes`` were given up for others. ``fetched_tokens``: by the name of the main group's rung.
    """

    nbytes: int
    used_nbytes: int
    num_blocks: int
    out_nbytes: int
    written_nbytes: int
    fetched_nbytes: int
    dropped_nbytes: int
    fetched_tokens: dict[str, int]
