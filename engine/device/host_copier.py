"""Copies of blocks between KV memory and host memory: ahead of other work, or beside a step.

On a GPU each direction has a stream of its own, so that blocks leave and come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kv.moves import HostCopy
from .host_memory import HostMemory

LEAD_RUNS, LEAD_NBYTES = 4, 2**21  # first copies of a command, with pauses: a step's own small ones go in between
RUN_NBYTES = 2**25  # of one copy: full speed, and what comes waits for no more of what leaves than it must
Mark = Any  # a moment in the work of a stream


class SideWork(Protocol):
    """Work beside the main stream, done in the order in which it is enqueued."""

    def beside(self) -> AbstractContextManager[None]:
        """What is enqueued inside runs beside later work of the main stream, behind all that is enqueued there now."""

    def mark(self) -> Mark:
        """The moment at which all is done that was enqueued beside."""

    def pause(self) -> None:
        """Leaves a gap in what is enqueued beside, in which a copy of another stream may begin."""

    def follow(self, mark: Mark) -> None:
        """Has what is enqueued beside from now on wait for a moment of other work."""

    def join(self, mark: Mark | None = None) -> None:
        """Has later work of the main stream wait for that moment; None: for all that was enqueued beside it."""


class SideStream:
    """A stream of a GPU beside its current one; see ``SideWork``."""

    def __init__(self, memory: Tensor):
        """``memory``: what is copied there; it is not used again for something else before that is done."""
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        memory.record_stream(self._stream)
        self._word = memory.new_zeros(1)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Has the stream wait for the current one, and takes its place."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """An event of the stream."""
        return self._stream.record_event()

    def pause(self) -> None:
        """A kernel of no effect: copies around it do not follow each other at once."""
        self._word.neg_()

    def follow(self, mark: Mark) -> None:
        """Has the stream wait for an event."""
        self._stream.wait_event(mark)

    def join(self, mark: Mark | None = None) -> None:
        """Has the current stream wait for this one, or for an event."""
        if mark is None:
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            torch.cuda.current_stream().wait_event(mark)


class _Leaving(NamedTuple):
    """A copy on its way out, which is over at ``mark``."""

    copy: HostCopy
    mark: Mark


class HostCopier:
    """Copies blocks of ``memory`` out to ``host``, and back. On a GPU nothing here waits for the device."""

    def __init__(self, memory: Tensor, host: HostMemory, sides: tuple[SideWork, SideWork] | None = None):
        """``sides``: of the device, for what leaves and for what comes; None on a CPU, where a copy is done at once."""
        self._memory, self._host = memory, host
        if sides is None and memory.is_cuda:
            sides = SideStream(memory), SideStream(memory)
        self._sides = sides
        self._leaving: list[_Leaving] = []  # copies that the main stream does not wait for yet
        self._is_beside = False  # copies may be under way beside the step before

    def join(self) -> None:
        """Has all that comes after wait for the copies beside the step before."""
        if self._is_beside and self._sides is not None:
            for side in self._sides:
                side.join()
        self._is_beside = False

    def leave(self, copies: Iterable[HostCopy]) -> None:
        """Copies blocks out, behind all that is enqueued now. What is enqueued after ``settle`` waits for them."""
        runs = self._runs(copies)
        if self._sides is None:
            self._write(runs)
        elif runs:
            out, _ = self._sides
            with out.beside():
                for run in runs:
                    self._write([run])
                    self._leaving.append(_Leaving(run, out.mark()))

    def settle(self) -> None:
        """Has all that comes after wait for the blocks that leave."""
        if self._leaving and self._sides is not None:
            self._sides[0].join(self._leaving[-1].mark)
        self._leaving.clear()

    def copy_beside(self, written: Iterable[HostCopy], fetched: Iterable[HostCopy]) -> None:
        """Copies blocks out and back beside the step that follows, behind all that is enqueued now.

        Each block comes as soon as those have left that had its place; the step waits for all that leave.
        """
        writes, fetches = self._runs(written), self._runs(fetched)
        if self._sides is None:
            self._write(writes)
            self._fetch(fetches)
            return
        out, back = self._sides

        def fetch(run: HostCopy) -> None:
            self._let_go_first(back, run)
            self._fetch([run])

        _enqueue(back, fetches, fetch)
        self.settle()
        _enqueue(out, writes, lambda run: self._write([run]))
        self._is_beside = bool(writes or fetches)

    def _let_go_first(self, back: SideWork, run: HostCopy) -> None:
        """Has what comes wait for the last of what leaves from the same bytes."""
        start, end = run.device, run.device + run.nbytes
        for copy, mark in reversed(self._leaving):
            if copy.device < end and start < copy.device + copy.nbytes:
                back.follow(mark)
                return

    def _write(self, runs: Iterable[HostCopy]) -> None:
        for device, host in map(self._bytes, runs):
            host.copy_(device, non_blocking=True)

    def _fetch(self, runs: Iterable[HostCopy]) -> None:
        for device, host in map(self._bytes, runs):
            device.copy_(host, non_blocking=True)

    def _runs(self, copies: Iterable[HostCopy]) -> list[HostCopy]:
        return merged(copies, self._host.piece_nbytes)

    def _bytes(self, run: HostCopy) -> tuple[Tensor, Tensor]:
        """The bytes of a copy in both memories, once the host's may be used."""
        device, host, nbytes = run
        self._host.wait(host, host + nbytes)
        return self._memory[device : device + nbytes], self._host.tensor[host : host + nbytes]


def merged(copies: Iterable[HostCopy], piece_nbytes: int) -> list[HostCopy]:
    """The same bytes in few copies, in the order of the device's, each within one piece of host memory."""
    runs: list[HostCopy] = []
    for copy in sorted(copies):
        last = runs[-1] if runs else HostCopy(-1, -1, 0)
        if (last.device + last.nbytes, last.host + last.nbytes) == (copy.device, copy.host):
            runs[-1] = last._replace(nbytes=last.nbytes + copy.nbytes)
        else:
            runs.append(copy)
    return [part for run in runs for part in _within_pieces(run, piece_nbytes)]


def _enqueue(side: SideWork, runs: Sequence[HostCopy], copy: Callable[[HostCopy], None]) -> None:
    """Copies ``runs`` beside, with gaps between the first ones."""
    if runs:
        with side.beside():
            for number, run in enumerate(led(runs)):
                copy(run)
                if number < LEAD_RUNS:
                    side.pause()


def led(runs: Sequence[HostCopy]) -> list[HostCopy]:
    """The same bytes in the same order, the first ones in small copies."""
    found, left = list[HostCopy](), LEAD_RUNS
    for device, host, nbytes in runs:
        done = 0
        while left and done < nbytes:
            size = min(LEAD_NBYTES, nbytes - done)
            found.append(HostCopy(device + done, host + done, size))
            done, left = done + size, left - 1
        if done < nbytes:
            found.append(HostCopy(device + done, host + done, nbytes - done))
    return found


def _within_pieces(copy: HostCopy, piece_nbytes: int) -> Iterator[HostCopy]:
    device, host, left = copy
    while left:
        nbytes = min(left, RUN_NBYTES, piece_nbytes - host % piece_nbytes)
        yield HostCopy(device, host, nbytes)
        device, host, left = device + nbytes, host + nbytes, left - nbytes
