"""A KV store behind host memory: pieces are written from there, and read into it, by the store's own threads."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Event

from ..closable import Closable
from ..kv.host_piece import HostBlock, HostPiece
from ..kv_store.log import StoredBlock
from ..kv_store.store import KVStore, KVStoreStats, Piece
from .host_memory import HostMemory

logger = logging.getLogger("qkv_engine")

READ_SECONDS = 5.0  # after which nobody waits for a piece
SETTLE_SECONDS = 10.0  # for what is under way when books begin anew


class DiskWrite:
    """A piece that is written; implements ``kv.disk.DiskJob``."""

    has_come = is_overdue = False

    def __init__(self) -> None:
        self.is_over = False


class DiskRead:
    """A piece that is read; implements ``kv.disk.DiskJob``."""

    def __init__(self, result: Future[bool]):
        self._result, self._deadline = result, time.monotonic() + READ_SECONDS

    def on_end(self, call: Callable[[], None]) -> None:
        """Has ``call`` called, from any thread, once it is over."""
        self._result.add_done_callback(lambda _: call())

    @property
    def is_over(self) -> bool:
        return self._result.done()

    @property
    def has_come(self) -> bool:
        return self._result.done() and self._result.exception() is None and self._result.result()

    @property
    def is_overdue(self) -> bool:
        return not self.is_over and time.monotonic() > self._deadline


class HostDisk(Closable):
    """Implements ``kv.disk.Disk`` for the engine's thread. ``store``: of the blocks whose copies ``host`` holds."""

    def __init__(self, store: KVStore, host: HostMemory):
        self._store, self._host = store, host
        number = host.tensor.nbytes
        self._bytes = memoryview((ctypes.c_char * number).from_address(host.tensor.data_ptr())).cast("B")
        self._jobs: list[DiskWrite | DiskRead] = []
        self._news = Event()  # some job is over

    @property
    def can_write(self) -> bool:
        return self._store.is_writable

    def rungs(self, key: bytes) -> Mapping[int, int]:
        stored = self._store.find(key)
        return {} if stored is None else stored.rungs

    def lacks(self, key: bytes, rungs: Mapping[int, int]) -> bool:
        return self._store.lacks(key, dict(rungs))

    def has_room(self, nbytes: int) -> bool:
        return self._store.has_room(nbytes)

    def write(self, piece: HostPiece) -> DiskWrite:
        job = DiskWrite()

        def done() -> None:
            job.is_over = True
            self._news.set()

        copies = _ordered(piece)
        blocks = [StoredBlock(c.group, c.rung, self._view(c).toreadonly()) for c in copies]
        if self._store.put(_named(piece), blocks, done):
            self._note(job)
        else:
            done()
        return job

    def read(self, piece: HostPiece) -> DiskRead:
        copies, stored = _ordered(piece), self._store.find(piece.key)
        if stored is None or stored.rungs != {copy.group: copy.rung for copy in copies}:  # given up since
            result = Future[bool]()
            result.set_result(False)
            return DiskRead(result)
        for copy in copies:
            self._host.wait(copy.slot.address, copy.slot.address + copy.slot.nbytes)
        job = DiskRead(self._store.fetch(stored, _named(piece), [self._view(copy) for copy in copies]))
        job.on_end(self._news.set)
        self._note(job)
        return job

    def forget(self, key: bytes) -> None:
        self._store.take_out(key)

    def let_age(self, key: bytes) -> None:
        self._store.let_age(key)

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)
        self._news.clear()

    def settle(self) -> bool:
        """Waits for all that is under way, before host memory gets other books; whether nothing is any more."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while any(not job.is_over for job in self._jobs) and time.monotonic() < deadline:
            self.wait(0.1)
        self._jobs = [job for job in self._jobs if not job.is_over]
        if self._jobs:
            logger.warning("the disk of the KV store stands still; host memory is not used again")
        return not self._jobs

    def stats(self) -> KVStoreStats:
        """Of the store."""
        return self._store.stats()

    def close(self) -> None:
        """Writes what waits, and closes the store."""
        self._store.close()

    def _note(self, job: DiskWrite | DiskRead) -> None:
        self._jobs = [job, *(job for job in self._jobs if not job.is_over)]

    def _view(self, copy: HostBlock) -> memoryview:
        return self._bytes[copy.slot.address : copy.slot.address + copy.slot.nbytes]


def _ordered(piece: HostPiece) -> Sequence[HostBlock]:
    return sorted(piece.held(), key=lambda copy: copy.group)


def _named(piece: HostPiece) -> Piece:
    return Piece(piece.key, piece.parent, piece.tokens, piece.tenant)
