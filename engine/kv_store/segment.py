"""A segment: an append-only file of records, of one namespace, behind a header."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ..errors import StoreError
from .namespace import Namespace
from .record import ALIGNMENT, RECORD_MAGIC, RecordHeader, aligned, claimed_size, is_ordered, signature

SEGMENT_MAGIC: Final = b"QKVSTORE"
VERSION: Final = 1  # of the format; files of another version are not read
_MAX_HEADER_NBYTES = 2**20
_FIXED = struct.Struct("<8s16sIIQ")  # magic, signature, version, bytes of JSON, number
_MAC = slice(8, 24)
_SEARCH_NBYTES = 2**20  # read at once in search of a record behind damage


class SegmentHeader(NamedTuple):
    """The number of a segment, which its file is named by, and the namespace of its records."""

    number: int
    namespace: Namespace

    @property
    def nbytes(self) -> int:
        """Bytes of the header with its padding, where the first record begins."""
        return aligned(_FIXED.size + len(self.namespace.encode()))

    def pack(self, secret: bytes) -> bytes:
        """The header's bytes, signed and padded."""
        text = self.namespace.encode()
        unsigned = _FIXED.pack(SEGMENT_MAGIC, bytes(16), VERSION, len(text), self.number) + text
        signed = unsigned[: _MAC.start] + signature(unsigned, secret) + unsigned[_MAC.stop :]
        return signed.ljust(self.nbytes, b"\0")

    @classmethod
    def read(cls, fd: int, secret: bytes) -> SegmentHeader:
        """The header of a file. Raises ``StoreError`` for anything but a segment of this store, and ``OSError``."""
        data = os.pread(fd, ALIGNMENT, 0)
        if len(data) < _FIXED.size or data[:8] != SEGMENT_MAGIC:
            raise StoreError("no segment of a KV store")
        _, mac, version, text_nbytes, number = _FIXED.unpack_from(data)
        if version != VERSION:
            raise StoreError(f"a segment of version {version}, not {VERSION}")
        if text_nbytes > _MAX_HEADER_NBYTES:
            raise StoreError("its header was altered")
        data += os.pread(fd, max(0, _FIXED.size + text_nbytes - len(data)), len(data))
        data = data[: _FIXED.size + text_nbytes]
        if mac != signature(data[: _MAC.start] + bytes(16) + data[_MAC.stop :], secret):
            raise StoreError("its header was altered, or the store has another secret")
        try:
            return cls(number, Namespace.decode(data[_FIXED.size :]))
        except msgspec.MsgspecError as error:
            raise StoreError("its header is of another release") from error


class SegmentScan:
    """A walk over the headers of a segment's records, from one to the next. Nothing of the blocks is read.

    ``end``: where the last good record ends. ``num_gaps``: stretches between good records that are none.
    """

    def __init__(self, fd: int, header: SegmentHeader, secret: bytes, nbytes: int, start: int | None = None):
        """``nbytes``: size of the file. ``start``: where a record begins, by default the first one."""
        self._fd, self._header, self._secret, self._nbytes = fd, header, secret, nbytes
        self.end = header.nbytes if start is None else start
        self.num_gaps = 0

    @property
    def tail_nbytes(self) -> int:
        """Bytes behind the last good record. Call it after the walk."""
        return max(0, self._nbytes - self.end)

    def records(self) -> Iterator[RecordHeader]:
        """Records that lie whole in the file, in order. Raises ``OSError``."""
        place = self.end
        while place < self._nbytes:
            record = self._read(place)
            if record is None:
                place = self._search(place + ALIGNMENT)
                continue
            self.num_gaps += place > self.end
            place = self.end = record.end
            yield record

    def _read(self, place: int) -> RecordHeader | None:
        """The record at ``place``, or None if none is there or it is cut off."""
        data = os.pread(self._fd, ALIGNMENT, place)
        try:
            more = claimed_size(data) - len(data)
            if more > 0:
                data += os.pread(self._fd, more, place + len(data))
            record = RecordHeader.unpack(data, self._secret)
        except StoreError:
            return None
        is_here = (record.segment, record.offset) == (self._header.number, place)
        return record if is_here and record.end <= self._nbytes and self._is_of_namespace(record) else None

    def _is_of_namespace(self, record: RecordHeader) -> bool:
        sizes = [self._header.namespace.nbytes(part.group, part.rung) for part in record.parts]
        return is_ordered(record.parts) and sizes == [part.nbytes for part in record.parts]

    def _search(self, place: int) -> int:
        """The next place from ``place`` on where a record seems to begin; the file's size if there is none."""
        while place < self._nbytes:
            data = os.pread(self._fd, _SEARCH_NBYTES, place)
            found = data.find(RECORD_MAGIC)
            while found >= 0 and found % ALIGNMENT:
                found = data.find(RECORD_MAGIC, found + 1)
            if found >= 0:
                return place + found
            if len(data) < _SEARCH_NBYTES:
                break
            place += len(data)
        return self._nbytes
