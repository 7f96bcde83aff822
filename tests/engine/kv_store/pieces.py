"""Pieces of made-up prefixes, whose blocks follow from their keys, and the namespace that they belong to. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.kv_store.index import StoredPiece
from qkv_engine.kv_store.log import StoredBlock
from qkv_engine.kv_store.namespace import Namespace, StoredGroup, StoredRung
from qkv_engine.kv_store.store import KVStore, Piece

MODEL = ModelFingerprint("toy", "Toy", 2, 1, 8, 16, 99, "ab" * 32)
WIDE = StoredGroup((StoredRung("dense16", 5000), StoredRung("int4", 1500)), (StoredRung("sink", 700),))
WINDOW = StoredGroup((StoredRung("dense16", 4096),), (StoredRung("sink", 16),))
NAMESPACE = Namespace(MODEL, "toy-ladder", "cd" * 32, 16, (WIDE, WINDOW))
SMALL = 2**19  # bytes of a store of a few segments
LARGE = StoredGroup((StoredRung("dense16", 600_000), StoredRung("int4", 150_000)), (StoredRung("sink", 90_000),))
LARGE_NAMESPACE = Namespace(MODEL, "large", "cd" * 32, 16, (LARGE, WINDOW))
ROOT = bytes(32)
BOTH = ((0, 0), (1, 0))


def sha(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def piece(number: int, parent: bytes = ROOT) -> Piece:
    """The piece of a number behind ``parent``."""
    return Piece(sha(number, parent), parent, [byte % 99 for byte in sha(number)[:16]])


def contents(key: bytes, group: int, rung: int, nbytes: int | None = None) -> bytes:
    """The bytes of a piece's block, which depend on the key, the group and the rung; no two pages are equal."""
    nbytes = nbytes or NAMESPACE.nbytes(group, rung)
    assert nbytes is not None
    tile = hashlib.shake_128(repr((key, group, rung)).encode()).digest(4099)
    return (tile * (nbytes // len(tile) + 1))[:nbytes]


def blocks(key: bytes, rungs: Sequence[tuple[int, int]] = BOTH, namespace: Namespace = NAMESPACE) -> list[StoredBlock]:
    sizes = [(group, rung, namespace.nbytes(group, rung)) for group, rung in rungs]
    return [StoredBlock(group, rung, memoryview(contents(key, group, rung, nbytes))) for group, rung, nbytes in sizes]


def put(store: KVStore, number: int, rungs: Sequence[tuple[int, int]] = BOTH, namespace: Namespace = NAMESPACE) -> bool:
    own = piece(number)
    return store.put(own, blocks(own.key, rungs, namespace))


def buffers(stored: StoredPiece) -> list[memoryview]:
    """Buffers full of bytes that nobody stored."""
    return [memoryview(bytearray(b"\xee" * nbytes)) for _, _, nbytes in stored.parts]


def read(store: KVStore, own: Piece) -> dict[int, int] | None:
    """The rungs of a piece by group, with a check that its bytes are right; None for a miss."""
    stored = store.find(own.key)
    if stored is None:
        return None
    found = buffers(stored)
    if not store.read(stored, own, found):
        return None
    for (group, rung, nbytes), data in zip(stored.parts, found, strict=True):
        assert bytes(data) == contents(own.key, group, rung, nbytes), f"wrong bytes of group {group} on rung {rung}"
    return stored.rungs
