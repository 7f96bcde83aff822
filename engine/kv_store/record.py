"""A record of a segment file: a header that names one piece of a prefix, and behind it the bytes of its blocks.

The header is signed with the folder's secret and holds a checksum of each block. Blocks begin at multiples of
``ALIGNMENT``, so that they are read straight into a buffer. docs/kv_store.md has the table of bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

from ..errors import StoreError

ALIGNMENT: Final = 4096  # of records and blocks, in bytes
RECORD_MAGIC: Final = b"QKVBLOCK"
KEY_NBYTES: Final = 32
VOID_KEY: Final = bytes(KEY_NBYTES)  # of a record that was taken out; no digest is
MAX_PARTS: Final = 16  # blocks of a record, one a group
MAX_TOKENS: Final = 8192  # of a record; bounds what a header may claim
_MAC_NBYTES: Final = 16
_FIXED = struct.Struct("<8s16sQQII32s32s")  # magic, signature, segment, offset, parts, tokens, key, parent
_PART = struct.Struct("<HhIQ")  # group, rung, checksum, bytes


class PartHeader(NamedTuple):
    """A block of a record: its group of layers, its rung, its bytes and their CRC-32."""

    group: int
    rung: int
    checksum: int
    nbytes: int


@dataclass(frozen=True)
class RecordHeader:
    """The header of a record.

    ``segment`` and ``offset``: where the record stands, so that a copy elsewhere is none. ``key`` and ``parent``:
    digests of the piece's key and of the one before, under the secret. ``tokens``: as ``pack_tokens`` writes them.
    """

    segment: int
    offset: int
    key: bytes
    parent: bytes
    tokens: bytes
    parts: tuple[PartHeader, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the piece."""
        return len(self.tokens) // 8

    @cached_property
    def header_nbytes(self) -> int:
        """Bytes of the header with its padding."""
        return header_size(len(self.parts), self.num_tokens)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each block begins in the segment, and where the next record does."""
        return part_offsets(self.offset + self.header_nbytes, [part.nbytes for part in self.parts])

    @property
    def end(self) -> int:
        """Where the next record begins in the segment."""
        return self.offsets[-1]

    def pack(self, secret: bytes) -> bytes:
        """The header's bytes, signed and padded."""
        place = self.segment, self.offset, len(self.parts), self.num_tokens, self.key, self.parent
        rest = b"".join(_PART.pack(*part) for part in self.parts) + self.tokens
        unsigned = _FIXED.pack(RECORD_MAGIC, bytes(_MAC_NBYTES), *place) + rest
        signed = _FIXED.pack(RECORD_MAGIC, signature(unsigned, secret), *place) + rest
        return signed.ljust(self.header_nbytes, b"\0")

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> RecordHeader:
        """The header at the beginning of ``data``. Raises ``StoreError`` for anything that ``pack`` did not make."""
        if len(data) < claimed_size(data):
            raise StoreError("a header of a record is cut off")
        _, mac, segment, offset, num_parts, num_tokens, key, parent = _FIXED.unpack_from(data)
        used = _used_size(num_parts, num_tokens)
        unsigned = b"".join((data[:8], bytes(_MAC_NBYTES), data[8 + _MAC_NBYTES : used]))
        if mac != signature(unsigned, secret):
            raise StoreError("a header of a record was altered")
        table = memoryview(data)[_FIXED.size : used - 8 * num_tokens]
        parts = tuple(PartHeader(*part) for part in _PART.iter_unpack(table))
        return cls(segment, offset, key, parent, bytes(data[used - 8 * num_tokens : used]), parts)


def signature(data: bytes, secret: bytes) -> bytes:
    """Keyed digest of a header, of 16 bytes."""
    return hashlib.blake2b(data, key=secret, digest_size=_MAC_NBYTES, person=b"qkv store header").digest()


def key_digest(key: bytes, namespace: bytes, secret: bytes) -> bytes:
    """What a record says of a piece's key: a keyed digest, from which nobody without the secret can guess a salt."""
    return hashlib.blake2b(namespace + key, key=secret, digest_size=KEY_NBYTES, person=b"qkv store key").digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int64. Raises ``ValueError`` for too many, or for none."""
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise ValueError(f"a piece of {len(tokens)} tokens, not 1 to {MAX_TOKENS}")
    return struct.pack(f"<{len(tokens)}q", *tokens)


def claimed_size(data: bytes) -> int:
    """Bytes that the header at the beginning of ``data`` says it has, without a look at its signature.

    Raises ``StoreError`` for what is no header or claims too much.
    """
    if len(data) < _FIXED.size or data[:8] != RECORD_MAGIC:
        raise StoreError("no header of a record")
    num_parts, num_tokens = _FIXED.unpack_from(data)[4:6]
    if not (0 < num_parts <= MAX_PARTS and 0 < num_tokens <= MAX_TOKENS):
        raise StoreError("a header of a record was altered")
    return header_size(num_parts, num_tokens)


def header_size(num_parts: int, num_tokens: int) -> int:
    """Bytes of a header with its padding."""
    return aligned(_used_size(num_parts, num_tokens))


def _used_size(num_parts: int, num_tokens: int) -> int:
    return _FIXED.size + num_parts * _PART.size + 8 * num_tokens


def part_offsets(start: int, sizes: Sequence[int]) -> list[int]:
    """Where blocks of ``sizes`` begin from ``start`` on, and where the last one's padding ends."""
    offsets = [start]
    for nbytes in sizes:
        offsets.append(offsets[-1] + aligned(nbytes))
    return offsets


def is_ordered(parts: Sequence[PartHeader]) -> bool:
    """Whether the groups of ``parts`` are different ones in order."""
    return all(first.group < second.group for first, second in pairwise(parts))


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
