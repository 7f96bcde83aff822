"""Moves of blocks as a command: plain data, the same for every rank, since equal arenas have equal addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import msgspec

from .bank import Centres, Mining
from .block import Block, Move
from .table import BlockTables


class MoveLaunch(NamedTuple):
    """Blocks of a wave and a ``group`` of layers that go from its rung ``old`` to ``new``, with their addresses.

    Of slots of requests, which have rungs of their own below zero, those of the first, whose sizes all have.
    ``nbytes``: of a block on ``old``;  ``banks``: addresses of the blocks' banks, if they are sealed under some, and
    ``num_windows`` of ``Move`` for each.
    """

    group: int
    old: int
    new: int
    nbytes: int
    src: list[int]
    dst: list[int]
    banks: list[int]
    num_windows: list[int]


class HostCopy(NamedTuple):
    """``nbytes`` bytes at an address of KV memory and at one of the host tier, copied from one to the other."""

    device: int
    host: int
    nbytes: int


class Wave(NamedTuple):
    """Moves of which none reads what another one writes; before them banks get patterns.

    Each bank is named by its group and address. Before all that the arena's ``hole`` comes to lie at other addresses:
    its first byte and the byte behind it; None: it stays. First of all the blocks of ``outs`` leave for the host.
    """

    mined: list[tuple[int, int, Mining]]
    centres: list[tuple[int, int, Centres]]
    launches: list[MoveLaunch]
    hole: tuple[int, int] | None = None
    outs: Sequence[HostCopy] = ()


class MoveCommand(msgspec.Struct, frozen=True, gc=False, tag="moves"):
    """Waves of moves in their order, then slots (address, bytes) that hold an earlier owner's bytes, and keep them.

    Beside the step that follows blocks are ``written`` to the host tier, and ``fetched`` from there: what the step
    neither writes nor reads. The next command waits for them.
    """

    waves: list[Wave]
    fresh: list[tuple[int, int]]
    written: Sequence[HostCopy] = ()
    fetched: Sequence[HostCopy] = ()


def take_moves(tables: BlockTables) -> tuple[MoveCommand, list[Block]]:
    """Moves noted in the books since the last call, and the blocks that lose dense values, in the command's order."""
    store = tables.store
    noted, store.waves = store.waves, []
    holes, store.holes = store.holes, {}
    outs, written, fetched = ({}, (), ()) if store.host is None else store.host.take()
    waves, blocks = [], list[Block]()
    for number, moves in enumerate(noted):
        banked = [(move.block.group, move.bank, move) for move in moves if move.bank is not None]
        mined = [(group, bank, move.mining) for group, bank, move in banked if move.mining is not None]
        centres = [(group, bank, move.centres) for group, bank, move in banked if move.centres is not None]
        launches = []
        launch = partial(_launch, tables)
        for _, same in groupby(sorted(moves, key=launch), key=launch):
            part = list(same)
            index, old, new = part[0].block.group, part[0].old, part[0].new
            group = tables.groups[index]
            banks = [move.bank for move in part if move.bank is not None]
            num_windows = [move.num_windows for move in part if move.bank is not None]
            src, dst = [move.src for move in part], [move.dst for move in part]
            launches.append(MoveLaunch(index, old, new, group.sizes[old], src, dst, banks, num_windows))
            if old != new and group.spec.rung(old).has_dense:
                blocks += [move.block for move in part]
        waves.append(Wave(mined, centres, launches, holes.get(number), outs.get(number, ())))
    last = len(noted)
    if last in holes or last in outs:
        waves.append(Wave([], [], [], holes.get(last), outs.get(last, ())))
    filled = {copy.device for copy in fetched}
    fresh = [(slot.address, slot.nbytes) for slot in store.take_fresh() if slot.address not in filled]
    return MoveCommand(waves, fresh, written, fetched), blocks


def _launch(tables: BlockTables, move: Move) -> tuple[int, int, int]:
    """What all moves of one launch share: group and rungs. Those of slots of a request go together by their sizes."""
    sizes = tables.groups[move.block.group].sizes
    old, new = (-sizes[rung] if rung < 0 else rung for rung in (move.old, move.new))
    return move.block.group, old, new
