"""Carries out moves of blocks on the device: one copy there, few launches, one copy back."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.device.pinned import HostCopies, PinnedRing, RowsCopy
from qkv_engine.kernels.formats import BlockLayout
from qkv_engine.kernels.mine import mine
from qkv_engine.kernels.step_down import copy, transfer

from ..device.graphs import Graphs
from .block import Block, Move

MOST = 128  # blocks of one launch; more take several
FEW = 8  # blocks; launches of up to so many recur and are captured as graphs


class Moving(NamedTuple):
    """Moves under way; the last row of ``copy`` says of each whether the block's values are finite."""

    moves: list[Move]
    copy: RowsCopy


class PendingMoves:
    """Moves that the device may still be carrying out."""

    def __init__(self, moving: list[Moving]):
        self._moving = moving

    def wait(self) -> set[Block]:
        """Blocks found to hold values that are not finite, once the device has looked at them. May be called once."""
        bad: set[Block] = set()
        for moves, copy_ in self._moving:
            finite = copy_.wait()[2]
            bad.update(move.block for move, ok in zip(moves, finite, strict=True) if not ok)
        return bad


class Mover:
    """Rewrites blocks of ``memory`` at other places. Nothing here waits for the device."""

    def __init__(self, memory: Tensor, cuda_graphs: bool):
        self.memory = memory
        # Rows of up to MOST words: source and target addresses, whether values are finite, and the banks of blocks
        # that are sealed under one.
        self._words = torch.zeros(4 * MOST, dtype=torch.int64, device=memory.device)
        self._ring, self._copies = PinnedRing(self._words), HostCopies(self._words)
        self._graphs = Graphs(memory.device) if cuda_graphs and memory.is_cuda else None

    def mine(self, moves: list[Move], source: BlockLayout, target: BlockLayout) -> None:
        """Fills the banks of the requests whose first block is among ``moves``, from blocks laid out as ``source``."""
        for move in moves:
            if move.bank is not None and move.mining is not None:
                mine(self.memory, *move.mining, move.bank, source, target)

    def copy(self, moves: list[Move], nbytes: int) -> None:
        """Moves blocks of ``nbytes`` without rewriting them."""
        copy(self.memory, [move.src for move in moves], [move.dst for move in moves], nbytes)

    def step_down(self, moves: list[Move], source: BlockLayout, target: BlockLayout) -> list[Moving]:
        """Rewrites blocks in another layout; returns the moves whose values are checked, those out of dense pages."""
        moving = []
        for part in (moves[i : i + MOST] for i in range(0, len(moves), MOST)):
            self._launch(part, source, target)
            if source.has_dense:
                moving.append(Moving(part, self._copies.begin(3, len(part))))
        return moving

    def _launch(self, moves: list[Move], source: BlockLayout, target: BlockLayout) -> None:
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
