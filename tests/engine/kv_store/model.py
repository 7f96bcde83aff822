"""A store beside what it should hold: each operation is checked, and so is what may be lost by damage.

Blocks follow from their keys, so a wrong byte is seen whatever happened. One thread: each write is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkv_engine.kv_store.index import StoredPiece

from .code import Code, load
from .pieces import BOTH, NAMESPACE, SMALL, blocks, piece, read

FAVOURITE = 0  # a piece that is read after every operation
PAGE = 4096
STEPS = ((0, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 0),), ((1, 0),), ((0, -1), (1, -1)), ((0, 1),)


def worth(rungs: dict[int, int], old: dict[int, int]) -> bool:
    """Whether a record of ``rungs`` takes the place of an ``old`` one."""
    return rungs != old and old.keys() <= rungs.keys() and all(rungs[group] <= old[group] for group in old)


class CheckedStore:
    """A store in ``path`` under a size limit, opened and closed again, whose files may be damaged."""

    def __init__(self, path: Path, code: Code | None = None, max_nbytes: int = SMALL):
        self.path, self.code, self.max_nbytes = path, code or load(), max_nbytes
        self.namespace = self.code.copy_of(NAMESPACE)
        self.rungs: dict[int, dict[int, int]] = {}  # of pieces that were stored
        self.written: dict[int, int] = {}  # bytes of records written so far when the piece's was
        self.before = 0  # of those bytes, until the store was opened
        self.lost: set[int] = set()  # pieces that damage may have hit
        self.altered: set[str] = set()  # names of files
        self.store = self._open()
        self.segment_nbytes = self.code.store.limits_of(max_nbytes, self.namespace).segment_nbytes

    def _open(self) -> Any:
        store = self.code.store.KVStore(self.path, self.max_nbytes, self.namespace)
        assert store.flush() and store.stats().is_writable, store.stats().problem
        return store

    @property
    def total(self) -> int:
        """Bytes of records written so far."""
        return self.before + int(self.store.stats().written_nbytes)

    # ---- operations

    def put(self, number: int, rungs: Sequence[tuple[int, int]] = BOTH) -> None:
        """Offers a piece and waits until it is written."""
        old, told, own = self.place(number), list[int](), piece(number)
        is_taken = self.store.put(own, blocks(own.key, rungs), lambda: told.append(1))
        assert self.store.flush() and len(told) == is_taken
        if is_taken:
            assert old is None or worth(dict(rungs), old.rungs), "a piece took the place of a better one"
            self.rungs[number], self.written[number] = dict(rungs), self.total
            self.lost.discard(number)
            assert self.read(number), "what was written is not found"
        else:
            assert old is not None and not worth(dict(rungs), old.rungs), "a piece was refused"
            assert self.store.stats().num_dropped == 0
        self.check()

    def read(self, number: int) -> bool:
        """Reads a piece; whether it was there. Its bytes are checked."""
        found = read(self.store, piece(number))
        assert found is None or number in self.rungs, "a piece that nobody stored"
        if found is not None and number not in self.lost:
            assert found == self.rungs[number], "blocks on other rungs"
        return found is not None

    def read_as_another(self, number: int, other: int) -> None:
        """Asks for a piece with other tokens, or behind another parent, under the same key."""
        stored, own = self.place(number), piece(number)
        if stored is not None:
            for wrong in (own._replace(tokens=[*own.tokens[1:], 1000 + other]), own._replace(parent=piece(other).key)):
                found = [memoryview(bytearray(nbytes)) for _, _, nbytes in stored.parts]
                assert not self.store.read(stored, wrong, found), "blocks of other tokens"
            self.put(number)  # it was taken out, as a damaged one is

    def reopen(self) -> None:
        """Closes and opens the store; it holds what it held."""
        had = {number for number in self.rungs if self.place(number) is not None}
        self.before = self.total
        self.store.close()
        assert self.store.find(piece(FAVOURITE).key) is None
        self.store = self._open()
        has = {number for number in self.rungs if self.place(number) is not None}
        assert has - self.lost == had - self.lost, "a store that was reopened holds something else"
        self.check()

    def crash(self) -> None:
        """Opens what another process sees now, as after the death of this one."""
        with self.code.store.KVStore(self.path, self.max_nbytes, self.namespace, read_only=True) as other:
            assert not other.stats().is_writable
            for number in self.rungs:
                assert (read(other, piece(number)) is None) == (self.place(number) is None) or number in self.lost

    # ---- damage, between closing and opening

    def damage(self, choice: int, offset: int, kind: str) -> None:
        """Damages one segment at ``offset``, and checks that no piece elsewhere is lost."""
        numbers = self.segments()
        if not numbers:
            return
        name = numbers[choice % len(numbers)]
        if not (self.path / f"{name:016x}.kv").stat().st_size:
            return
        places = {number: place for number in self.rungs if (place := self.place(number)) is not None}
        self.before = self.total
        self.store.close()
        file = self.path / f"{name:016x}.kv"
        self.altered.add(file.name)
        hit = alter(file, offset % file.stat().st_size, kind)
        for number, place in places.items():
            header_is_hit = hit[0] < PAGE and place.segment == name
            if header_is_hit or (place.segment == name and touches(place, hit)):
                self.lost.add(number)
        self.store = self._open()
        for number in places:
            assert self.read(number) or number in self.lost, "a piece was lost that no damage hit"
        self.check()

    # ---- checks

    def place(self, number: int) -> StoredPiece | None:
        found: StoredPiece | None = self.store.find(piece(number).key)
        return found

    def segments(self) -> list[int]:
        return sorted(int(path.stem, 16) for path in self.path.glob("*.kv"))

    def check(self) -> None:
        """Sizes, and that the newest records are there."""
        stats = self.store.stats()
        sizes = [path.stat().st_size for path in self.path.glob("*.kv")]
        assert sum(sizes) <= self.max_nbytes, "more bytes than the limit"
        assert (sum(sizes), len(sizes)) == (stats.nbytes, stats.num_segments)
        whole = [file.stat().st_size for file in self.path.glob("*.kv") if file.name not in self.altered]
        assert max(whole, default=0) <= self.segment_nbytes, "a segment is too long"
        kept = self.max_nbytes - 4 * self.segment_nbytes
        for number, written in self.written.items():
            if self.total - written < kept and number not in self.lost:
                assert self.place(number) is not None, "one of the newest pieces was given up"
        self.read(FAVOURITE)
        found = sum(self.place(number) is not None for number in self.rungs)
        assert found == self.store.stats().num_pieces

    def close(self) -> None:
        self.store.close()


def touches(place: StoredPiece, hit: tuple[int, int]) -> bool:
    """Whether a record has bytes in the range ``hit``."""
    return place.offset < hit[1] and hit[0] < place.offset + place.nbytes


def alter(file: Path, offset: int, kind: str) -> tuple[int, int]:
    """Damages a file; returns the range of bytes that may have changed."""
    data = bytearray(file.read_bytes())
    page = offset // PAGE * PAGE
    if kind == "flip":
        data[offset] ^= 1 << (offset % 8)
        hit = offset, offset + 1
    elif kind == "cut":
        del data[offset:]
        hit = offset, 2**62
    elif kind == "zeros":
        hit = offset, min(len(data), offset + PAGE)
        data[hit[0] : hit[1]] = bytes(hit[1] - hit[0])
    elif kind == "noise":
        hit = offset, min(len(data), offset + 100)
        data[hit[0] : hit[1]] = os.urandom(hit[1] - hit[0])
    elif kind == "longer":
        data += os.urandom(offset % 9000)
        hit = len(data), 2**62
    elif kind == "shifted":
        data[page:page] = bytes(PAGE)
        hit = page, 2**62
    elif kind == "repeated":  # a page over the next one
        data[page + PAGE : page + 2 * PAGE] = data[page : page + PAGE]
        hit = page + PAGE, page + 2 * PAGE
    else:
        assert kind == "swapped"  # the first page after the header and another one
        first = data[PAGE : 2 * PAGE]
        data[PAGE : 2 * PAGE], data[page : page + PAGE] = data[page : page + PAGE], first
        hit = 0, 2**62
    file.write_bytes(data)
    return hit


KINDS = ("flip", "cut", "zeros", "noise", "longer", "shifted", "repeated", "swapped")
