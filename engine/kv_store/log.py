"""The segments of a store as one log: records are appended to the newest one, and the oldest are given up.

A segment that is given up hands on those of its records that were used since they were written, up to half a segment.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from ..errors import StoreError
from .contents import Contents, contents_nbytes, entry_nbytes
from .folder import StoreFolder, segment_name
from .index import PieceIndex, StoredPiece
from .namespace import Namespace
from .reader import read_checked, read_header
from .record import ALIGNMENT, VOID_KEY, PartHeader, RecordHeader
from .segment import SegmentHeader, SegmentScan

logger = logging.getLogger("qkv_engine")

_PADDING = bytes(ALIGNMENT)


class StoreLimits(NamedTuple):
    """The most bytes of all segments together, and of one."""

    max_nbytes: int
    segment_nbytes: int


class StoredBlock(NamedTuple):
    """A block on its way to the store: its group of layers, its rung, and its bytes."""

    group: int
    rung: int
    data: memoryview


class Draft(NamedTuple):
    """A record that is to be written; ``key`` and ``parent`` are digests already. ``tenant``: whom it counts for."""

    key: bytes
    parent: bytes
    tokens: bytes
    blocks: Sequence[StoredBlock]
    tenant: str | None = None


class _Tip(NamedTuple):
    """The segment that is appended to."""

    number: int
    fd: int


class SegmentLog:
    """Reads segments into the index, and lets the owner append. Methods that write are for one thread at a time.

    ``lock`` guards the index and the ``counters``, which other threads read.
    """

    def __init__(
        self,
        folder: StoreFolder,
        namespace: Namespace,
        limits: StoreLimits,
        index: PieceIndex,
        counters: Counter[str],
        lock: Lock,
    ):
        self._folder, self._namespace, self._limits = folder, namespace, limits
        self._index, self._counters, self._lock = index, counters, lock
        self._digest = namespace.digest()
        self._tip: _Tip | None = None
        self._written: list[StoredPiece] = []  # in the tip
        self._table_nbytes = 0  # of their entries in its table of contents
        self._sizes: dict[int, int] = {}  # of all files with names of segments
        self._ends: dict[int, int] = {}  # where the last record that was read or written ends; of segments of ours
        self._unusable: set[int] = set()
        self._last = 0  # the highest number of a segment so far
        self._complained: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(list(self._sizes.values()))

    @property
    def num_segments(self) -> int:
        """Number of segments, of other namespaces and unusable ones too."""
        return len(self._sizes)

    def complain(self, number: int, why: object) -> None:
        """Warns of a segment once."""
        with self._lock:
            self._counters["num_damaged"] += 1
            is_known = number in self._complained
            self._complained.add(number)
        if not is_known:
            logger.warning("KV store %s: %s: %s; it is ignored", self._folder.path, segment_name(number), why)

    # ---- reading

    def refresh(self) -> None:
        """Indexes what is new in the folder since the last call, and forgets what is gone. Raises ``OSError``."""
        files = dict(self._folder.segments())
        for number in set(self._sizes) - set(files):
            self._forget(number)
        for number, nbytes in files.items():
            if not nbytes and self._folder.is_owner:  # begun by a process that died then
                self._folder.remove(number)
            elif nbytes != self._sizes.get(number, 0):
                self._sizes[number] = nbytes
                self._read_segment(number, nbytes)

    def _read_segment(self, number: int, nbytes: int) -> None:
        try:
            with self._folder.opened(number) as fd:
                self._index_segment(fd, number, nbytes)
        except FileNotFoundError:
            self._forget(number)
        except OSError as error:
            self.complain(number, error)
        except StoreError as error:
            self._unusable.add(number)
            self.complain(number, error)

    def _index_segment(self, fd: int, number: int, nbytes: int) -> None:
        header = SegmentHeader.read(fd, self._folder.secret)
        if header.number != number:
            raise StoreError(f"a copy of {segment_name(header.number)}")
        self._last = max(self._last, number)
        self._unusable.discard(number)
        if header.namespace.digest() != self._digest:
            return
        contents = Contents.read(fd, number, nbytes, self._folder.secret)
        if contents is not None:
            self._add(piece for piece in contents.pieces if piece.offset >= self._ends.get(number, 0))
            self._ends[number] = contents.end
            return
        scan = SegmentScan(fd, header, self._folder.secret, nbytes, self._ends.get(number))
        self._add(map(StoredPiece.of, scan.records()))
        self._ends[number] = scan.end
        if scan.num_gaps:
            self.complain(number, "some records were altered")
        if scan.tail_nbytes and self._folder.is_owner:
            self.complain(number, "its end is cut off or was altered")
            self._folder.truncate(number, scan.end)
            self._sizes[number] = scan.end

    def _add(self, pieces: Iterable[StoredPiece]) -> None:
        for piece in pieces:
            with self._lock:
                self._index.add(piece)

    def _forget(self, number: int) -> None:
        """Takes a segment that is gone out of the books."""
        self._sizes.pop(number, None)
        self._ends.pop(number, None)
        self._unusable.discard(number)
        with self._lock:
            self._index.drop_segment(number)

    # ---- writing

    def append(self, draft: Draft) -> None:
        """Writes a record to the tip, and gives up old segments for it if need be. Raises ``OSError``."""
        parts = tuple(
            PartHeader(block.group, block.rung, zlib.crc32(block.data), len(block.data)) for block in draft.blocks
        )
        record = self._place(draft, parts)
        if self._tip is None or not self._fits(record):
            self._begin()
            record = self._place(draft, parts)
        assert self._tip is not None
        pieces = [memoryview(record.pack(self._folder.secret))]
        for block in draft.blocks:
            pieces += [block.data, memoryview(_PADDING)[: -len(block.data) % ALIGNMENT]]
        _write_or_cut(self._tip.fd, pieces, record.offset)
        self._sizes[self._tip.number] = self._ends[self._tip.number] = record.end
        piece = StoredPiece.of(record)
        self._written.append(piece)
        self._table_nbytes += entry_nbytes(piece)
        with self._lock:
            self._index.add(piece, draft.tenant)
            self._counters["num_written"] += 1
            self._counters["written_nbytes"] += record.end - record.offset

    def take_out(self, piece: StoredPiece) -> None:
        """Leaves a record that nobody finds in a piece's place, for good. Raises ``OSError``."""
        with suppress(FileNotFoundError, StoreError), self._folder.opened(piece.segment, writable=True) as fd:
            header = read_header(fd, piece, self._folder.secret)
            void = replace(header, key=VOID_KEY, parent=VOID_KEY).pack(self._folder.secret)
            _write(fd, [memoryview(void)], piece.offset)
        if piece in self._written:
            self._written[self._written.index(piece)] = replace(piece, key=VOID_KEY)

    def sync(self) -> None:
        """Has all records reach the disk. Raises ``OSError``."""
        if self._tip is not None:
            os.fdatasync(self._tip.fd)

    def close(self) -> None:
        """Ends the tip with a table of its contents; the next record begins a segment. Raises ``OSError``."""
        if self._tip is not None:
            (number, fd), self._tip = self._tip, None
            contents = Contents(self._ends[number], self._written)
            self._written, self._table_nbytes = [], 0
            try:
                _write_or_cut(fd, [memoryview(contents.pack(number, self._folder.secret))], contents.end)
                self._sizes[number] = os.fstat(fd).st_size
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def shrink(self, max_nbytes: int) -> None:
        """Gives up segments, unusable ones first and then the oldest, until ``max_nbytes`` are left. ``OSError``."""
        while self.nbytes > max_nbytes and (victim := self._victim()) is not None:
            self._give_up(victim)

    def _place(self, draft: Draft, parts: tuple[PartHeader, ...]) -> RecordHeader:
        """The header of a record at the tip's end."""
        number = 0 if self._tip is None else self._tip.number
        return RecordHeader(number, self._ends.get(number, 0), draft.key, draft.parent, draft.tokens, parts)

    def _fits(self, record: RecordHeader) -> bool:
        """Whether the tip has room for a record and its entry in the table of contents."""
        table_nbytes = self._table_nbytes + entry_nbytes(StoredPiece.of(record))
        return record.end + contents_nbytes(table_nbytes) <= self._limits.segment_nbytes

    def _begin(self) -> None:
        """Begins a segment behind all others, with the used records of those that are given up for it.

        The older ones leave room for it and for half a segment, which the next one's first records may take.
        """
        self.close()
        header_nbytes = self._create()
        max_nbytes, segment_nbytes = self._limits
        room = segment_nbytes // 2 - header_nbytes
        while (victim := self._victim()) is not None and self._old_nbytes > max_nbytes - segment_nbytes * 3 // 2:
            room -= self._hand_on(victim, room)
            self._give_up(victim)

    def _create(self) -> int:
        """Makes the tip's file; returns the bytes of its header."""
        while self._tip is None:
            self._last += 1
            with suppress(FileExistsError):  # a file that is no segment of ours
                self._tip = _Tip(self._last, self._folder.add(self._last))
        header = SegmentHeader(self._last, self._namespace)
        try:
            _write(self._tip.fd, [memoryview(header.pack(self._folder.secret))], 0)
            self._folder.sync()
        except BaseException:
            with suppress(OSError):
                self._folder.remove(self._last)
            os.close(self._tip.fd)
            self._tip = None
            raise
        self._sizes[self._last] = self._ends[self._last] = header.nbytes
        return header.nbytes

    @property
    def _old_nbytes(self) -> int:
        return self.nbytes - (0 if self._tip is None else self._sizes[self._tip.number])

    def _victim(self) -> int | None:
        """The segment to be given up next, never the tip: an unusable one, or the oldest.

        Of those that have records of tenants over their share, if there are such.
        """
        with self._lock:
            over = self._index.segments_over()
        tip = None if self._tip is None else self._tip.number
        numbers = (number for number in self._sizes if number != tip)
        return min(numbers, key=lambda n: (n not in self._unusable, bool(over) and n not in over, n), default=None)

    def _give_up(self, number: int) -> None:
        """Deletes a segment, which nobody finds any more by then."""
        with self._lock:
            self._counters["num_evicted"] += self._index.drop_segment(number)
        self._folder.remove(number)
        self._forget(number)

    def _hand_on(self, number: int, room: int) -> int:
        """Appends records of a segment again, the first ones, in ``room`` bytes; returns how many it took."""
        with self._lock:
            pieces = self._index.handed_on(number)
        taken = 0
        for piece in pieces:
            if taken + piece.nbytes > room:
                break
            draft = self._read_again(piece)
            if draft is not None:
                self.append(draft)
                taken += piece.nbytes
                with self._lock:
                    self._counters["num_handed_on"] += 1
        return taken

    def _read_again(self, piece: StoredPiece) -> Draft | None:
        """The record of a piece, checked; None for one that cannot be read."""
        try:
            with self._folder.opened(piece.segment) as fd:
                header = read_header(fd, piece, self._folder.secret)
                blocks = []
                for part, offset in zip(header.parts, header.offsets, strict=False):
                    data = memoryview(bytearray(part.nbytes))
                    if read_checked(fd, offset, data) != part.checksum:
                        raise StoreError("some records were altered")
                    blocks.append(StoredBlock(part.group, part.rung, data))
        except FileNotFoundError:  # taken out
            return None
        except (OSError, StoreError) as error:
            self.complain(piece.segment, error)
            return None
        with self._lock:
            tenant = self._index.tenant_of(piece.key)
        return Draft(header.key, header.parent, header.tokens, blocks, tenant)


def _write_or_cut(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Writes ``pieces`` at the end of a file, or leaves it as it was. Raises ``OSError``."""
    try:
        _write(fd, pieces, offset)
    except BaseException:
        with suppress(OSError):
            os.ftruncate(fd, offset)
        raise


def _write(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Writes ``pieces`` one after the other from ``offset`` on. Raises ``OSError``."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        done = os.pwritev(fd, left, offset)
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
