"""Host memory: where cached blocks sleep that have left KV memory, a memory-mapped file or pinned memory."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CapacityError
from ..sizes import format_size
from .memory import memory_or_error

logger = logging.getLogger("qkv_engine")

PIECE_NBYTES = 128 * 2**20  # of pinned memory, registered at once: the driver is held up for some 20 ms each time
MOST_THREADS = 8  # that touch pages; more gain little, since pages are handed out and registered under locks
REMEDY = "Lower host_memory"


class HostMemory(Protocol):
    """Memory of one tensor on the host."""

    tensor: Tensor  # [nbytes] uint8, undefined at first
    piece_nbytes: int  # of the pieces that it is made of; no copy may lie in two

    def wait(self, start: int, end: int) -> None:
        """Blocks until copies from and to the bytes ``start`` to ``end`` may be enqueued."""


def allocate_host(nbytes: int, device: torch.device, folder: str | None = None) -> HostMemory:
    """Host memory of [nbytes] beside KV memory on ``device``; ``folder``: of the file of a CPU.

    Raises ``CapacityError`` if the system does not give it.
    """
    message = "the system does not give so much host memory"
    with memory_or_error(message, field="host_memory", value=format_size(nbytes), remedy=REMEDY):
        return FileMemory(nbytes, folder) if device.type == "cpu" else PinnedMemory(nbytes, CudaPins(device))


class FileMemory:
    """A memory-mapped file without a name: it takes room on a disk, and of memory what the system has to spare.

    The end of the process, however it comes, leaves nothing behind.
    """

    def __init__(self, nbytes: int, folder: str | None = None):
        """``folder``: of the file; None for the system's temporary one. Raises ``CapacityError`` if it lacks room."""
        folder = folder or tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _reserve(file.fileno(), nbytes)
                self._pages = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            message = f"no file of that size in {folder}: {error.strerror or error}"
            raise CapacityError(message, field="host_memory", value=format_size(nbytes), remedy=REMEDY) from error
        self.tensor, self.piece_nbytes = torch.frombuffer(self._pages, dtype=torch.uint8), nbytes

    def wait(self, start: int, end: int) -> None:
        """Nothing: a CPU copies at once."""


def _reserve(file: int, nbytes: int) -> None:
    """Has the disk's room taken now: a page that finds none later would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:  # macOS
        os.ftruncate(file, nbytes)


class Pins(Protocol):
    """Has a device know of memory that it may read and write by itself."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pins bytes of this process. Raises ``RuntimeError`` if the device does not take them. From any thread."""

    def unpin(self, addresses: Sequence[int]) -> None:
        """Lets go of what was pinned at ``addresses``, once nothing is copied any more."""


class PinnedMemory:
    """Memory that a GPU reads and writes by itself, pinned piece by piece in the background.

    Pieces are pinned from both ends, where books begin. One that cannot be pinned is copied as ordinary memory, which
    is slower. Several threads touch the pages first, which a registration would do one by one.
    """

    def __init__(self, nbytes: int, pins: Pins):
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor, self.piece_nbytes = torch.frombuffer(pages, dtype=torch.uint8), PIECE_NBYTES
        number = -(-nbytes // PIECE_NBYTES)
        self._ready = [Event() for _ in range(number)]
        left, pinned = deque(sorted(range(number), key=lambda piece: min(piece, number - 1 - piece))), list[int]()
        given = self.tensor, left, pinned, self._ready, pins
        count = min(MOST_THREADS, number, os.cpu_count() or 1)
        threads = [Thread(target=_pin_all, args=given, daemon=True, name="pin host memory") for _ in range(count)]
        weakref.finalize(self, _unpin_all, self.tensor, left, pinned, pins, threads)
        for thread in threads:
            thread.start()

    def wait(self, start: int, end: int) -> None:
        """Blocks until the pieces are pinned, or known to stay as they are."""
        for ready in self._ready[start // PIECE_NBYTES : -(-end // PIECE_NBYTES)]:
            ready.wait()


def _pin_all(memory: Tensor, left: deque[int], pinned: list[int], ready: list[Event], pins: Pins) -> None:
    """Pins pieces of ``memory`` while some are ``left`` to any thread; notes their addresses."""
    with suppress(IndexError):
        while True:
            piece = left.popleft()
            part = memory[piece * PIECE_NBYTES : (piece + 1) * PIECE_NBYTES]
            try:
                part[:: mmap.PAGESIZE].zero_()
                pins.pin(part.data_ptr(), len(part))
                pinned.append(part.data_ptr())
            except RuntimeError as error:
                logger.warning("%s of host memory are not pinned, copies are slow: %s", format_size(len(part)), error)
            finally:
                ready[piece].set()


def _unpin_all(memory: Tensor, left: deque[int], pinned: list[int], pins: Pins, threads: list[Thread]) -> None:
    """Lets go of ``memory``, which lives until then."""
    left.clear()
    for thread in threads:
        if thread.ident is not None:  # started
            thread.join()
    pins.unpin(pinned)


class CudaPins:
    """Memory that a GPU has registered; see ``Pins``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def pin(self, address: int, nbytes: int) -> None:
        """Registers bytes of this process. Raises ``RuntimeError`` if the driver refuses them."""
        with torch.cuda.device(self._device):  # a new thread is on the first GPU
            status = self._runtime.cudaHostRegister(address, nbytes, 0)
        if int(status):
            raise RuntimeError(f"cudaHostRegister: {status}")

    def unpin(self, addresses: Sequence[int]) -> None:
        """Waits for copies under way, and lets go; a lost device has let go itself."""
        with suppress(RuntimeError), torch.cuda.device(self._device):
            torch.cuda.synchronize()
            for address in addresses:
                self._runtime.cudaHostUnregister(address)
