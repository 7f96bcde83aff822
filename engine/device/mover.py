"""Carries out moves of blocks on a device: one copy there, few launches, one copy back."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.delta_net import StateFormat, StateSpec, narrow_states
from qkv_engine.kernels.formats import BlockLayout
from qkv_engine.kernels.mine import add_centres, mine
from qkv_engine.kernels.step_down import copy, transfer

from ..kv.block import Block
from ..kv.moves import MoveCommand, MoveLaunch
from .host_copier import HostCopier
from .host_memory import HostMemory
from .layouts import Ladder
from .pinned import HostCopies, PinnedRing, RowsCopy

if TYPE_CHECKING:
    from .gpu.graphs import Graphs

MOST = 128  # blocks of one launch; more take several
Dig = Callable[[int, int], None]  # ``KVMemory.dig``
FEW = 8  # blocks; launches of up to so many recur and are captured as graphs


class BlockRewrite(NamedTuple):
    """Blocks go from one layout to another one."""

    source: BlockLayout
    target: BlockLayout

    @property
    def has_dense(self) -> bool:
        """Whether dense values may be lost, which are looked at."""
        return self.source.has_dense

    def __call__(self, memory: Tensor, src: Tensor, dst: Tensor, finite: Tensor, *under: Tensor) -> None:
        """See ``transfer``."""
        transfer(memory, src, dst, self.source, self.target, finite, *under)


class StateRewrite(NamedTuple):
    """States go from the format of ``source`` to a narrower one, in a model that computes in ``dtype``."""

    source: StateSpec
    target: StateFormat
    dtype: torch.dtype

    @property
    def has_dense(self) -> bool:
        """Whether dense values may be lost, which are looked at."""
        return not self.source.format.has_scales

    def __call__(self, memory: Tensor, src: Tensor, dst: Tensor, finite: Tensor, *under: Tensor) -> None:
        """See ``narrow_states``."""
        narrow_states(memory, src, dst, self.source, self.target, self.dtype, finite)


Rewrite = BlockRewrite | StateRewrite


class PendingMoves:
    """Moves that the device may still be carrying out."""

    def __init__(self, blocks: list[Block], checks: list[RowsCopy]):
        """``checks``: copies whose last rows say of each of ``blocks`` whether its dense values are finite."""
        self._blocks, self._checks = blocks, checks

    def wait(self) -> set[Block]:
        """Blocks found to hold values that are not finite, once the device has looked at them. May be called once."""
        if not self._blocks:
            return set()
        finite = chain.from_iterable(check.wait()[2] for check in self._checks)
        return {block for block, ok in zip(self._blocks, finite, strict=True) if not ok}


class MoveBackend(Protocol):
    """Carries out moves of blocks over KV memory of its own."""

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        """Enqueues moves; returns checks under way of the blocks that lose dense values, in the command's order."""


class Mover:
    """Rewrites blocks of ``memory`` at other places. Nothing here waits for the device."""

    def __init__(
        self,
        memory: Tensor,
        ladder: Ladder,
        graphs: Graphs | None = None,
        dig: Dig | None = None,
        host: HostMemory | None = None,
    ):
        """``graphs``: of launches that recur;  ``dig``: has memory be held elsewhere, where it may be.

        ``host``: where blocks are copied to that leave; None if none is.
        """
        self.memory, self.ladder, self._dig = memory, ladder, dig
        self._host = None if host is None else HostCopier(memory, host)
        # Rows of up to MOST words: source and target addresses, whether values are finite, and the banks of blocks
        # that are sealed under one, with the windows whose patterns they may choose from.
        self._words = torch.zeros(5 * MOST, dtype=torch.int64, device=memory.device)
        self._ring, self._copies = PinnedRing(self._words), HostCopies(self._words)
        self._graphs = graphs

    def move(self, command: MoveCommand) -> list[RowsCopy]:
        """Enqueues moves; returns checks under way of the blocks that lose dense values, in the command's order.

        Copies beside the step that follows come last; those of the command before come to their end first.
        """
        checks = []
        if self._host is not None:
            self._host.join()
        layouts = [(group.widest.layout, group.narrowest.layout) for group in self.ladder.groups]
        for mined, centres, launches, hole, outs in command.waves:
            if self._host is not None:
                self._host.leave(outs)
                if mined or centres or launches or hole is not None:
                    self._host.settle()
            if hole is not None and self._dig is not None:
                self._dig(*hole)
            for group, bank, mining in mined:
                mine(self.memory, *mining, bank, *layouts[group])
            for group, bank, windows in centres:
                add_centres(self.memory, *windows, bank, *layouts[group])
            for launch in launches:
                if launch.old == launch.new:
                    copy(self.memory, launch.src, launch.dst, launch.nbytes)
                else:
                    checks += self._step_down(launch)
        if self.memory.is_cpu:
            # Attention in torch masks unwritten tokens by adding -inf, which does not hide a NaN of an earlier owner.
            for address, nbytes in command.fresh:
                self.memory[address : address + nbytes].zero_()
        if self._host is not None:
            self._host.copy_beside(command.written, command.fetched)
        return checks

    def _step_down(self, launch: MoveLaunch) -> list[RowsCopy]:
        """Rewrites blocks in another layout, or states in another format."""
        rungs, (old, new) = self.ladder.groups[launch.group].rungs, (launch.old, launch.new)
        rewrite: Rewrite
        if old < 0:
            rewrite = StateRewrite(self.ladder.state_at(old), self.ladder.state_at(new).format, self.ladder.dtype)
        else:
            rewrite = BlockRewrite(rungs[old].layout, rungs[new].layout)
        checks = []
        for part in (slice(i, i + MOST) for i in range(0, len(launch.src), MOST)):
            src, dst, banks = launch.src[part], launch.dst[part], launch.banks[part]
            under = [banks, launch.num_windows[part]] if banks else []
            self._launch([src, dst, [1] * len(src), *under], rewrite)
            if rewrite.has_dense:
                checks.append(self._copies.begin(3, len(src)))
        return checks

    def _launch(self, rows: list[list[int]], rewrite: Rewrite) -> None:
        number = len(rows[0])
        self._ring.send(array("q", chain.from_iterable(rows)))

        def work() -> None:
            src, dst, finite, *rest = self._words[: len(rows) * number].view(len(rows), number).unbind()
            rewrite(self.memory, src, dst, finite, *rest)

        if self._graphs is None or number > FEW:
            work()
        else:
            self._graphs.run((rewrite, number), work)
