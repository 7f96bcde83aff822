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
LOOK_SECONDS = 0.1  # between looks at what has come while more is read: books hold Python's lock, which readers need
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
        self._jobs: set[DiskWrite | DiskRead] = set()  # under way; other threads take theirs out
        self._news = Event()  # some job is over
        self._look_at = 0.0

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
            self._end(job)

        blocks = [StoredBlock(c.group, c.rung, self._view(c).toreadonly()) for c in _ordered(piece)]
        self._jobs.add(job)
        if not self._store.put(_named(piece), blocks, done):
            done()
        return job

    def read(self, piece: HostPiece) -> DiskRead:
        copies, stored = _ordered(piece), self._store.find(piece.key)
        if stored is None or stored.rungs != {copy.group: copy.rung for copy in copies}:  # given up since
            result = Future[bool]()
            result.set_result(False)
            return DiskRead(result)

        def ready() -> None:
            for copy in copies:
                self._host.wait(copy.slot.address, copy.slot.address + copy.slot.nbytes)

        job = DiskRead(self._store.fetch(stored, _named(piece), [self._view(copy) for copy in copies], ready))
        self._jobs.add(job)
        job.on_end(lambda: self._end(job))
        return job

    def forget(self, key: bytes) -> None:
        self._store.take_out(key)

    def let_age(self, key: bytes) -> None:
        self._store.let_age(key)

    def wait(self, seconds: float) -> bool:
        self._news.wait(seconds)
        self._news.clear()
        now = time.monotonic()
        is_due = now >= self._look_at
        if is_due:
            self._look_at = now + LOOK_SECONDS
        return is_due

    def settle(self) -> bool:
        """Waits for all that is under way, before host memory gets other books; whether nothing is any more."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._jobs and time.monotonic() < deadline:
            self.wait(0.1)
        is_over = not self._jobs
        if not is_over:
            logger.warning("the disk of the KV store stands still; host memory is not used again")
        return is_over

    def stats(self) -> KVStoreStats:
        """Of the store."""
        return self._store.stats()

    def close(self) -> None:
        """Writes what waits, and closes the store."""
        self._store.close()

    def _end(self, job: DiskWrite | DiskRead) -> None:
        self._jobs.discard(job)
        self._news.set()

    def _view(self, copy: HostBlock) -> memoryview:
        return self._bytes[copy.slot.address : copy.slot.address + copy.slot.nbytes]


def _ordered(piece: HostPiece) -> Sequence[HostBlock]:
    return sorted(piece.held(), key=lambda copy: copy.group)


def _named(piece: HostPiece) -> Piece:
    return Piece(piece.key, piece.parent, piece.tokens, piece.tenant)
