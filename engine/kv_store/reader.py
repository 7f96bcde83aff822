"""Reading of one record into buffers, checked: its header, its tokens, and a checksum of each block."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from ..errors import StoreError
from .folder import StoreFolder
from .index import StoredPiece
from .record import VOID_KEY, RecordHeader, header_size

_CHUNK_NBYTES = 2**20  # read at once: its checksum is taken while it is in the CPU's cache, and the disk reads ahead


def read_header(fd: int, piece: StoredPiece, secret: bytes) -> RecordHeader:
    """The header of a piece's record. Raises ``StoreError`` unless it is the one that was indexed, and ``OSError``.

    One that was taken out is a ``FileNotFoundError``.
    """
    nbytes = header_size(len(piece.parts), piece.num_tokens)
    header = RecordHeader.unpack(os.pread(fd, nbytes, piece.offset), secret)
    if header.key == VOID_KEY != piece.key:
        raise FileNotFoundError("it was taken out")
    if StoredPiece.of(header) != piece:
        raise StoreError("another record stands in its place")
    return header


def read_blocks(
    folder: StoreFolder, piece: StoredPiece, parent: bytes, tokens: bytes, buffers: Sequence[memoryview]
) -> None:
    """Fills ``buffers`` with the blocks of a piece, of which ``parent`` and ``tokens`` are compared.

    Raises ``StoreError`` for a record that is damaged or of other tokens, ``FileNotFoundError`` for one that was given
    up, and ``OSError``. The buffers hold anything then.
    """
    with folder.opened(piece.segment) as fd:
        header = read_header(fd, piece, folder.secret)
        if (header.parent, header.tokens) != (parent, tokens):
            raise StoreError("its tokens are others")
        for part, offset, buffer in zip(header.parts, header.offsets, buffers, strict=False):
            if read_checked(fd, offset, buffer) != part.checksum:
                raise StoreError(f"bytes of group {part.group} were altered")


def read_checked(fd: int, offset: int, buffer: memoryview) -> int:
    """Fills ``buffer`` from ``offset`` on and returns the CRC-32. Raises ``StoreError`` at the end of the file."""
    checksum = 0
    for start in range(0, len(buffer), _CHUNK_NBYTES):
        chunk, done = buffer[start : start + _CHUNK_NBYTES], 0
        while done < len(chunk):
            number = os.preadv(fd, [chunk[done:]], offset + start + done)
            if not number:
                raise StoreError("its segment is cut off")
            done += number
        checksum = zlib.crc32(chunk, checksum)
    return checksum
