"""Copies of blocks between KV memory and host memory: in line with other work, or beside a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..kv.moves import HostCopy
from .host_memory import HostMemory


class SideWork(Protocol):
    """Work beside the main stream."""

    def beside(self) -> AbstractContextManager[None]:
        """What is enqueued inside runs beside later work of the main stream, behind all that is enqueued there now."""

    def join(self) -> None:
        """Has later work of the main stream wait for all that was enqueued beside it."""


class SideStream:
    """A stream of a GPU beside its current one; see ``SideWork``."""

    def __init__(self, memory: Tensor):
        """``memory``: what is copied there; it is not used again for something else before that is done."""
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        memory.record_stream(self._stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Has the stream wait for the current one, and takes its place."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Has the current stream wait for this one."""
        torch.cuda.current_stream().wait_stream(self._stream)


class HostCopier:
    """Copies blocks of ``memory`` out to ``host``, and back. On a GPU nothing here waits for the device."""

    def __init__(self, memory: Tensor, host: HostMemory, side: SideWork | None = None):
        """``side``: of the device; None on a CPU, where a copy is done at once."""
        self._memory, self._host = memory, host
        self._side = SideStream(memory) if side is None and memory.is_cuda else side
        self._is_beside = False  # copies may be under way beside the step before

    def join(self) -> None:
        """Has all that comes after wait for the copies beside the step before."""
        if self._is_beside and self._side is not None:
            self._side.join()
        self._is_beside = False

    def write(self, copies: Iterable[HostCopy]) -> None:
        """Copies blocks out in line."""
        for device, host in self._parts(copies):
            host.copy_(device, non_blocking=True)

    def fetch(self, copies: Iterable[HostCopy]) -> None:
        """Copies blocks back in line."""
        for device, host in self._parts(copies):
            device.copy_(host, non_blocking=True)

    def copy_beside(self, written: Iterable[HostCopy], fetched: Iterable[HostCopy]) -> None:
        """Copies blocks out and back beside the step that follows, behind all that is enqueued now."""
        if self._side is None:
            self.write(written)
            self.fetch(fetched)
        elif written or fetched:
            self._is_beside = True
            with self._side.beside():
                self.write(written)
                self.fetch(fetched)

    def _parts(self, copies: Iterable[HostCopy]) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of copies in both memories, once the host's may be used."""
        for device, host, nbytes in merged(copies, self._host.piece_nbytes):
            self._host.wait(host, host + nbytes)
            yield self._memory[device : device + nbytes], self._host.tensor[host : host + nbytes]


def merged(copies: Iterable[HostCopy], piece_nbytes: int) -> list[HostCopy]:
    """The same bytes in fewer copies, of which each lies within one piece of host memory."""
    runs: list[HostCopy] = []
    for copy in sorted(copies):
        last = runs[-1] if runs else HostCopy(-1, -1, 0)
        if (last.device + last.nbytes, last.host + last.nbytes) == (copy.device, copy.host):
            runs[-1] = last._replace(nbytes=last.nbytes + copy.nbytes)
        else:
            runs.append(copy)
    return [part for run in runs for part in _within_pieces(run, piece_nbytes)]


def _within_pieces(copy: HostCopy, piece_nbytes: int) -> Iterator[HostCopy]:
    device, host, left = copy
    while left:
        nbytes = min(left, piece_nbytes - host % piece_nbytes)
        yield HostCopy(device, host, nbytes)
        device, host, left = device + nbytes, host + nbytes, left - nbytes
