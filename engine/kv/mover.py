"""Carries out moves of blocks on the device: one copy there, few launches, one copy back."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain, groupby
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from qkv_engine.device.pinned import HostCopies, PinnedRing, RowsCopy
from qkv_engine.kernels.formats import BlockLayout
from qkv_engine.kernels.mine import mine
from qkv_engine.kernels.step_down import copy, transfer

from ..device.graphs import Graphs
from .bank import Mining
from .block import Block, Move, slot_rung
from .ladder import Ladder

MOST = 128  # blocks of one launch; more take several
FEW = 8  # blocks; launches of up to so many recur and are captured as graphs


class MoveWords(NamedTuple):
    """A ``Move`` without its block; ``number`` is its place among all moves of the command."""

    number: int
    src: int
    dst: int
    old: int
    new: int
    bank: int | None
    mining: Mining | None


class MoveCommand(msgspec.Struct, frozen=True, gc=False, tag="moves"):
    """Moves of blocks as plain data, wave after wave: a later wave may write where an earlier one has read.

    ``fresh``: address and bytes of slots that are handed out with an earlier owner's bytes in them.
    """

    waves: list[list[MoveWords]]
    fresh: list[tuple[int, int]]

    @classmethod
    def of(cls, waves: list[list[Move]], fresh: list[tuple[int, int]]) -> MoveCommand:
        """The command of ``waves``, whose moves are counted one after another."""
        first, found = 0, []
        for wave in waves:
            words = [(move.src, move.dst, move.old, move.new, move.bank, move.mining) for move in wave]
            found.append([MoveWords(number, *each) for number, each in enumerate(words, first)])
            first += len(wave)
        return cls(found, fresh)


class Checked(NamedTuple):
    """Moves by number; the last row of ``copy`` says of each whether the block's values are finite."""

    numbers: list[int]
    copy: RowsCopy


class PendingMoves:
    """Moves that the device may still be carrying out."""

    def __init__(self, waves: list[list[Move]], checked: list[Checked]):
        self._moves, self._checked = [move for wave in waves for move in wave], checked

    def wait(self) -> set[Block]:
        """Blocks found to hold values that are not finite, once the device has looked at them. May be called once."""
        bad: set[Block] = set()
        for numbers, copy_ in self._checked:
            finite = copy_.wait()[2]
            bad.update(self._moves[number].block for number, ok in zip(numbers, finite, strict=True) if not ok)
        return bad


class Mover:
    """Rewrites blocks of ``memory`` at other places. Nothing here waits for the device."""

    def __init__(self, memory: Tensor, ladder: Ladder, cuda_graphs: bool):
        self.memory, self._ladder = memory, ladder
        # Rows of up to MOST words: source and target addresses, whether values are finite, and the banks of blocks
        # that are sealed under one.
        self._words = torch.zeros(4 * MOST, dtype=torch.int64, device=memory.device)
        self._ring, self._copies = PinnedRing(self._words), HostCopies(self._words)
        self._graphs = Graphs(memory.device) if cuda_graphs and memory.is_cuda else None

    def execute(self, command: MoveCommand) -> list[Checked]:
        """Enqueues the moves; returns those whose values are checked, out of dense pages."""
        checked: list[Checked] = []
        for wave in command.waves:
            self._mine(wave)
            for (old, new), moves in _by_rungs(wave):
                if old == new:
                    self._copy(moves, old)
                else:
                    rungs = self._ladder.rungs
                    checked += self._step_down(moves, rungs[old].layout, rungs[new].layout)
        if self.memory.is_cpu:
            # Attention in torch masks unwritten tokens by adding -inf, which does not hide a NaN of an earlier owner.
            for address, nbytes in command.fresh:
                self.memory[address : address + nbytes].zero_()
        return checked

    def _mine(self, moves: list[MoveWords]) -> None:
        """Fills the banks of the requests whose first block is among ``moves``, from dense blocks."""
        source, target = self._ladder.widest.layout, self._ladder.narrowest.layout
        for move in moves:
            if move.bank is not None and move.mining is not None:
                mine(self.memory, *move.mining, move.bank, source, target)

    def _copy(self, moves: list[MoveWords], rung: int) -> None:
        """Moves blocks, or slots of requests, without rewriting them."""
        ladder = self._ladder
        nbytes = ladder.rungs[rung].block_nbytes if rung >= 0 else ladder.slots[slot_rung(rung)].nbytes
        copy(self.memory, [move.src for move in moves], [move.dst for move in moves], nbytes)

    def _step_down(self, moves: list[MoveWords], source: BlockLayout, target: BlockLayout) -> list[Checked]:
        """Rewrites blocks in another layout; returns the moves whose values are checked, those out of dense pages."""
        checked = []
        for part in (moves[i : i + MOST] for i in range(0, len(moves), MOST)):
            self._launch(part, source, target)
            if source.has_dense:
                checked.append(Checked([move.number for move in part], self._copies.begin(3, len(part))))
        return checked

    def _launch(self, moves: list[MoveWords], source: BlockLayout, target: BlockLayout) -> None:
        number = len(moves)
        rows = [[move.src for move in moves], [move.dst for move in moves], [1] * number]
        banks = [move.bank for move in moves if move.bank is not None]
        rows += [banks] if banks else []
        self._ring.send(array("q", chain.from_iterable(rows)))

        def work() -> None:
            src, dst, finite, *rest = self._words[: len(rows) * number].view(len(rows), number).unbind()
            transfer(self.memory, src, dst, source, target, finite, *rest)

        if self._graphs is None or number > FEW:
            work()
        else:
            self._graphs.run((source, target, number), work)


def _by_rungs(wave: list[MoveWords]) -> Iterable[tuple[tuple[int, int], list[MoveWords]]]:
    def key(move: MoveWords) -> tuple[int, int]:
        return move.old, move.new

    return ((rungs, list(moves)) for rungs, moves in groupby(sorted(wave, key=key), key=key))
