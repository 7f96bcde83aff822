"""The KV store: blocks of prefixes on disk, which survive the process. No torch.

A piece of a prefix is found by the key of the prefix cache, SHA-256 over salt, model, ladder and all tokens so far.
Nothing here raises once the store is open: what cannot be written or read is a miss, counted, and logged once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from ..closable import Closable
from ..errors import ConfigError, StoreError
from ..kv.shares import TenantShares
from ..sizes import format_least
from .contents import most_contents_nbytes
from .folder import OPTION, SIZE_OPTION, StoreFolder
from .index import PieceIndex, StoredPiece
from .log import Draft, SegmentLog, StoredBlock, StoreLimits
from .namespace import Namespace
from .reader import read_blocks
from .reads_first import ReadsFirst
from .record import ALIGNMENT, KEY_NBYTES, aligned, key_digest, pack_tokens
from .writer import WriterJob, WriterThread

logger = logging.getLogger("qkv_engine")

MAX_SEGMENT_NBYTES: Final = 2**28  # small enough that giving one up is a small step
MAX_QUEUED_NBYTES: Final = 2**28
NUM_READERS: Final = 8  # threads: each takes checksums, too, and a disk is at its speed with several reads at once
SEGMENTS: Final = 16  # of a store that is full, so that little is given up at once
LEAST_SEGMENTS: Final = 4  # of a small store
RECORDS: Final = 4  # of a segment at least: half of it may be handed on, and one must fit behind
CLOSE_SECONDS = 30.0  # for what waits to be written
HELD_SECONDS: Final = 10.0  # that writes wait at most while reads never end


class Piece(NamedTuple):
    """Tokens whose blocks are stored together, and where they stand: the prefix cache's key of the last token.

    ``parent``: the key of the piece before; that of no tokens for the first. ``tenant``: who asks.
    """

    key: bytes
    parent: bytes
    tokens: Sequence[int]
    tenant: str = ""


class KVStoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a store. Counters run since it was opened.

    num_pieces, num_segments, nbytes, max_nbytes: what stands in the folder; pieces are those of this namespace.
    num_found, num_missed: look-ups. num_read, read_nbytes: pieces that were read, and the bytes of their blocks.
    num_written, written_nbytes: records, with padding; num_handed_on: those among them that an old segment handed on.
    num_known: offers of pieces that were there. num_dropped: those without room in the queue, or that were not written.
    num_evicted: records that the limit deleted. num_damaged: records and files that were ignored.
    queued_nbytes: of blocks that wait to be written. is_writable: whether offers are taken. problem: why not.
    """

    num_pieces: int
    num_segments: int
    nbytes: int
    max_nbytes: int
    num_found: int
    num_missed: int
    num_read: int
    read_nbytes: int
    num_written: int
    written_nbytes: int
    num_handed_on: int
    num_known: int
    num_dropped: int
    num_evicted: int
    num_damaged: int
    queued_nbytes: int
    is_writable: bool
    problem: str


COUNTERS: Final = (
    *("num_found", "num_missed", "num_read", "read_nbytes", "num_written", "written_nbytes", "num_handed_on"),
    *("num_known", "num_dropped", "num_evicted", "num_damaged"),
)


class KVStore(Closable):
    """Blocks of one namespace in a folder. All methods may be called from any thread.

    The first process that opens a folder owns it and writes; others read what stood there when they opened it or
    called ``refresh``.
    """

    def __init__(
        self,
        folder: str | Path,
        max_nbytes: int,
        namespace: Namespace,
        *,
        max_queued_nbytes: int = MAX_QUEUED_NBYTES,
        read_only: bool = False,
        quota: float | None = None,
    ):
        """``max_nbytes``: the most bytes of all segments. ``max_queued_nbytes``: of blocks that wait to be written.

        ``quota``: share of a tenant in ``max_nbytes``; records of tenants over theirs make room first. None for none.
        Raises ``ConfigError`` for a folder that cannot be used, and for a limit in which too few blocks fit.
        """
        self._namespace, self._digest = namespace, namespace.digest()
        limits = limits_of(max_nbytes, namespace)
        self._max_nbytes = max_nbytes
        shares = TenantShares(None if quota is None else lambda: quota * max_nbytes)
        self._lock, self._counters, self._index = Lock(), Counter[str](), PieceIndex(shares)
        self._refreshing = Lock()
        self._pending: set[bytes] = set()
        self._reads_first = ReadsFirst(HELD_SECONDS)
        self._problem = ""
        self._folder = StoreFolder(folder, read_only=read_only)
        self._log = SegmentLog(self._folder, namespace, limits, self._index, self._counters, self._lock)
        self._readers = ThreadPoolExecutor(NUM_READERS, "qkv-kv-store-reader")
        self._is_closed = False
        try:
            self._log.refresh()
            self._writer = WriterThread(max_queued_nbytes) if self._folder.is_owner else None
        except (OSError, RuntimeError) as error:  # no thread left
            self._folder.close()
            raise ConfigError(f"cannot be used: {error}", field=OPTION, value=str(folder)) from error
        if self._writer is None:
            self._problem = "opened to be read" if read_only else f"process {self._folder.owner()} owns the folder"
            logger.info("KV store %s: %s; nothing is written", self._folder.path, self._problem)
        else:
            self._writer.put(WriterJob(0, self._shrink))

    # ---- finding and reading

    def find(self, key: bytes) -> StoredPiece | None:
        """What is stored of the piece of ``key``."""
        digest = self._key(key)
        with self._lock:
            piece = None if self._is_closed else self._index.get(digest)
            self._counters["num_missed" if piece is None else "num_found"] += 1
        return piece

    def read(self, stored: StoredPiece, piece: Piece, buffers: Sequence[memoryview]) -> bool:
        """Fills ``buffers``, one for each of ``stored.parts``, with the blocks of ``piece``; returns whether it could.

        If not, they hold anything. Raises ``ValueError`` for buffers of other sizes.
        """
        sizes = [nbytes for _, _, nbytes in stored.parts]
        if [len(buffer) for buffer in buffers] != sizes or any(b.itemsize != 1 or b.readonly for b in buffers):
            raise ValueError(f"{len(buffers)} buffers for blocks of {sizes} bytes")
        if self._is_closed or stored.key != self._key(piece.key):
            return False
        tokens = pack_tokens(piece.tokens)
        try:
            read_blocks(self._folder, stored, self._key(piece.parent), tokens, buffers)
        except FileNotFoundError:  # given up meanwhile
            self._forget(stored)
            return False
        except (OSError, StoreError) as error:
            self._forget(stored)
            self._log.complain(stored.segment, error)
            return False
        with self._lock:
            self._index.use(stored.key)
            self._index.own(stored.key, piece.tenant)
            self._counters["num_read"] += 1
            self._counters["read_nbytes"] += sum(sizes)
        return True

    def fetch(
        self, stored: StoredPiece, piece: Piece, buffers: Sequence[memoryview], ready: Callable[[], None] | None = None
    ) -> Future[bool]:
        """``read`` in the background, ahead of all writes; the buffers are the store's until the result is there.

        ``ready``: called in the background first; returns once the buffers may be written.
        """

        def read() -> bool:
            if ready is not None:
                ready()
            return self.read(stored, piece, buffers)

        self._reads_first.begin()
        try:
            result = self._readers.submit(read)
        except RuntimeError:  # closed, or no thread is left
            result = Future[bool]()
            result.set_result(False)
        result.add_done_callback(lambda _: self._reads_first.end())
        return result

    def refresh(self) -> None:
        """Finds what the owner of the folder has written and given up meanwhile. For a store that reads alone."""
        if self._writer is None and not self._is_closed:
            with self._refreshing, suppress(OSError):  # it finds what it found before
                self._log.refresh()

    # ---- writing

    def put(self, piece: Piece, blocks: Sequence[StoredBlock], done: Callable[[], None] | None = None) -> bool:
        """Takes the blocks of a piece to be written in the background, in the order of their groups.

        Returns ``False`` for what is stored already and for what is dropped. Otherwise the bytes must stay as they are
        until ``done`` is called, from the store's own thread. Raises ``ValueError`` for blocks that are none of the
        namespace.
        """
        self._check(piece, blocks)
        key = self._key(piece.key)
        with self._lock:
            known = self._index.get(key)
            rungs = {block.group: block.rung for block in blocks}
            if key in self._pending or (known is not None and not known.lacks(rungs)):
                self._index.use(key)
                self._index.own(key, piece.tenant)
                self._counters["num_known"] += 1
                return False
            if self._writer is None or self._problem or self._is_closed:
                self._counters["num_dropped"] += 1
                return False
            self._pending.add(key)
        draft = Draft(key, self._key(piece.parent), pack_tokens(piece.tokens), blocks, piece.tenant)
        is_taken = self._writer.put(
            WriterJob(sum(len(block.data) for block in blocks), lambda: self._write(draft, done))
        )
        if not is_taken:
            with self._lock:
                self._pending.discard(key)
                self._counters["num_dropped"] += 1
        return is_taken

    @property
    def is_writable(self) -> bool:
        """Whether pieces are taken to be written."""
        return not (self._problem or self._is_closed)

    def has_room(self, nbytes: int) -> bool:
        """Whether blocks of so many bytes more may wait to be written."""
        return self._writer is None or self._writer.has_room(nbytes)

    def lacks(self, key: bytes, rungs: dict[int, int]) -> bool:
        """Whether a piece on these ``rungs`` by group would be written: none is stored, or one that is worth less."""
        digest = self._key(key)
        with self._lock:
            known = self._index.get(digest)
            is_new = known is None or known.lacks(rungs)
            if not is_new:
                self._index.use(digest)
        return is_new

    def take_out(self, key: bytes) -> None:
        """Has the piece of ``key`` found no more, whose values turned out bad, nor one that waits to be written."""
        digest = self._key(key)
        with self._lock:
            stored = self._index.get(digest)
            self._index.discard(digest)
        if self._writer is not None and (stored is not None or digest in self._pending):
            self._writer.put(WriterJob(0, lambda: self._take_out(digest, stored)))

    def let_age(self, key: bytes) -> None:
        """Has the piece of ``key`` go with its segment, as if nobody had used it."""
        with self._lock:
            self._index.unuse(self._key(key))

    def flush(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Waits until what was put has reached the disk, at most ``timeout`` seconds; returns whether all of it did."""
        if self._writer is None:
            return True
        self._writer.put(WriterJob(0, self._sync))
        return self._writer.drain(timeout) and not self._problem

    def close(self) -> None:
        """Writes what was put, gives the folder to the next process, and finds nothing any more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._reads_first.close()
        is_over = self._writer is None or self._writer.close(CLOSE_SECONDS)
        self._readers.shutdown(wait=is_over)
        if not is_over:
            logger.warning("KV store %s: the disk stands still; what waits is lost", self._folder.path)
            return  # the thread holds the folder
        try:
            self._log.close()
        except OSError as error:
            self._fail(error)
        self._folder.close()

    def stats(self) -> KVStoreStats:
        """Contents and counters now."""
        with self._lock:
            return KVStoreStats(
                num_pieces=len(self._index),
                num_segments=self._log.num_segments,
                nbytes=self._log.nbytes,
                max_nbytes=self._max_nbytes,
                queued_nbytes=0 if self._writer is None else self._writer.nbytes,
                is_writable=self.is_writable,
                problem=self._problem,
                **{name: self._counters[name] for name in COUNTERS},
            )

    # ---- in the store's own thread

    def _write(self, draft: Draft, done: Callable[[], None] | None) -> None:
        self._reads_first.wait()
        try:
            if self._problem:
                with self._lock:
                    self._counters["num_dropped"] += 1
            else:
                self._log.append(draft)
        except Exception as error:
            with self._lock:
                self._counters["num_dropped"] += 1
            self._fail(error)
        finally:
            with self._lock:
                self._pending.discard(draft.key)
            if done is not None:
                done()

    def _take_out(self, digest: bytes, stored: StoredPiece | None) -> None:
        with self._lock:
            newer = self._index.get(digest)
            self._index.discard(digest)
        try:
            for piece in {stored, newer} - {None}:
                assert piece is not None
                self._log.take_out(piece)
        except OSError as error:
            self._fail(error)

    def _sync(self) -> None:
        try:
            self._log.sync()
        except OSError as error:
            self._fail(error)

    def _shrink(self) -> None:
        try:
            self._log.shrink(self._max_nbytes)
        except OSError as error:
            self._fail(error)

    # ---- parts

    def _fail(self, error: Exception) -> None:
        """Writes nothing any more; what stands is still read."""
        with self._lock:
            is_first, self._problem = not self._problem, self._problem or f"{type(error).__name__}: {error}"
        if is_first:
            logger.warning("KV store %s: %s; nothing more is written", self._folder.path, self._problem)

    def _forget(self, stored: StoredPiece) -> None:
        """Takes a record that cannot be read out of the index, unless another one took its place."""
        with self._lock:
            if self._index.get(stored.key) == stored:
                self._index.discard(stored.key)

    def _key(self, key: bytes) -> bytes:
        return key_digest(key, self._digest, self._folder.secret)

    def _check(self, piece: Piece, blocks: Sequence[StoredBlock]) -> None:
        groups = [block.group for block in blocks]
        if not blocks or groups != sorted(set(groups)):
            raise ValueError(f"blocks of groups {groups}")
        for block in blocks:
            nbytes = self._namespace.nbytes(block.group, block.rung)
            if nbytes != len(block.data) or block.data.itemsize != 1:
                raise ValueError(f"{len(block.data)} bytes on rung {block.rung} of group {block.group}, not {nbytes}")
        if len(piece.key) != KEY_NBYTES or not 0 < len(piece.tokens) <= self._namespace.piece_tokens:
            raise ValueError(f"a key of {len(piece.key)} bytes, {len(piece.tokens)} tokens")


def limits_of(max_nbytes: int, namespace: Namespace) -> StoreLimits:
    """Sizes of a store and its segments. Raises ``ConfigError`` for a size in which too few blocks fit."""
    header = aligned(len(namespace.encode()) + ALIGNMENT)
    least = RECORDS * namespace.largest_record + header + most_contents_nbytes(RECORDS)
    if max_nbytes < LEAST_SEGMENTS * least:
        remedy = f"Give at least {format_least(LEAST_SEGMENTS * least)}"
        raise ConfigError("too few blocks fit", field=SIZE_OPTION, value=max_nbytes, remedy=remedy)
    return StoreLimits(max_nbytes, max(least, min(MAX_SEGMENT_NBYTES, max_nbytes // SEGMENTS)))
