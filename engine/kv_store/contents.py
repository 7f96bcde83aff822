"""The table of contents of a segment, behind its records: written when the segment is full, read when it is opened.

It saves a look at each record's header. A segment without one, or with a damaged one, is walked (``SegmentScan``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from .index import StoredPiece
from .record import ALIGNMENT, KEY_NBYTES, MAX_PARTS, aligned, signature

CONTENTS_MAGIC: Final = b"QKVINDEX"
_LAST_PAGE = struct.Struct("<8s16sQQQ")  # magic, signature, segment, where the table begins, its bytes
_MAC = slice(8, 24)
_ENTRY = struct.Struct(f"<{KEY_NBYTES}sQII")  # key, offset, tokens, blocks
_BLOCK = struct.Struct("<HhQ")  # group, rung, bytes


class Contents(NamedTuple):
    """Where the records of a segment end, and their pieces in order."""

    end: int
    pieces: Sequence[StoredPiece]

    def pack(self, number: int, secret: bytes) -> bytes:
        """The table of segment ``number``, from ``end`` to the end of the file, signed and padded."""
        table = b"".join(map(_pack_entry, self.pieces))
        unsigned = _LAST_PAGE.pack(CONTENTS_MAGIC, bytes(16), number, self.end, len(table))
        mac = signature(unsigned + table, secret)
        page = unsigned[: _MAC.start] + mac + unsigned[_MAC.stop :]
        return table.ljust(aligned(len(table)), b"\0") + page.ljust(ALIGNMENT, b"\0")

    @classmethod
    def read(cls, fd: int, number: int, nbytes: int, secret: bytes) -> Contents | None:
        """The table of a file of ``nbytes``; None if it has none that ``pack`` made for it. Raises ``OSError``."""
        page = os.pread(fd, _LAST_PAGE.size, max(0, nbytes - ALIGNMENT))
        if len(page) < _LAST_PAGE.size or page[:8] != CONTENTS_MAGIC:
            return None
        _, mac, segment, end, size = _LAST_PAGE.unpack(page)
        if segment != number or end + aligned(size) + ALIGNMENT != nbytes:
            return None
        table = os.pread(fd, size, end)
        if mac != signature(page[: _MAC.start] + bytes(16) + page[_MAC.stop :] + table, secret):
            return None
        return cls(end, _unpack(table, number))


def entry_nbytes(piece: StoredPiece) -> int:
    """Bytes of a piece in the table."""
    return _ENTRY.size + len(piece.parts) * _BLOCK.size


def contents_nbytes(table_nbytes: int) -> int:
    """Bytes of a file behind its records, for entries of ``table_nbytes``."""
    return aligned(table_nbytes) + ALIGNMENT


def most_contents_nbytes(num_records: int) -> int:
    """The most that the table of ``num_records`` takes."""
    return contents_nbytes(num_records * (_ENTRY.size + MAX_PARTS * _BLOCK.size))


def _pack_entry(piece: StoredPiece) -> bytes:
    head = _ENTRY.pack(piece.key, piece.offset, piece.num_tokens, len(piece.parts))
    return head + b"".join(_BLOCK.pack(*part) for part in piece.parts)


def _unpack(table: bytes, number: int) -> list[StoredPiece]:
    """The pieces of a table, which is signed and so what ``pack`` made."""
    pieces, place = list[StoredPiece](), 0
    while place < len(table):
        key, offset, num_tokens, num_parts = _ENTRY.unpack_from(table, place)
        place += _ENTRY.size
        parts = tuple((*part,) for part in _BLOCK.iter_unpack(table[place : place + num_parts * _BLOCK.size]))
        place += num_parts * _BLOCK.size
        pieces.append(StoredPiece(key, number, offset, num_tokens, parts))
    return pieces
