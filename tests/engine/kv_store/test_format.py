"""The bytes of records and segments: what is packed is unpacked, and nothing else is taken for a record."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from struct import unpack_from

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv_engine.errors import ConfigError, StoreError
from qkv_engine.kv.spec import GroupSpec, KVSpec, RequestSlot, RungSize
from qkv_engine.kv_store.contents import Contents, contents_nbytes, entry_nbytes, most_contents_nbytes
from qkv_engine.kv_store.index import StoredPiece
from qkv_engine.kv_store.namespace import Namespace, StoredGroup, StoredRung
from qkv_engine.kv_store.record import (
    ALIGNMENT,
    MAX_PARTS,
    MAX_TOKENS,
    PartHeader,
    RecordHeader,
    key_digest,
    pack_tokens,
)
from qkv_engine.kv_store.segment import VERSION, SegmentHeader, SegmentScan
from qkv_engine.window import RecentWindow

from .pieces import MODEL, NAMESPACE

SECRET = b"s" * 32
U16, U32, U63 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 63))
PLACE = st.integers(0, 2**40).map(lambda page: page * ALIGNMENT)
PART = st.builds(PartHeader, U16, st.integers(-(2**15), 2**15 - 1), U32, U63)
KEY = st.binary(min_size=32, max_size=32)
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=600).map(pack_tokens)
HEADERS = st.builds(
    RecordHeader, U63, PLACE, KEY, KEY, TOKENS, st.lists(PART, min_size=1, max_size=MAX_PARTS).map(tuple)
)
FITTING = st.builds(  # records of NAMESPACE
    lambda rungs, tokens, key: ([PartHeader(g, r, 7, NAMESPACE.nbytes(g, r) or 0) for g, r in rungs], tokens, key),
    st.sampled_from([((0, 0), (1, 0)), ((0, 1),), ((1, -1),), ((0, -1), (1, 0))]),
    st.lists(st.integers(0, 98), min_size=1, max_size=16).map(pack_tokens),
    KEY,
)


@given(HEADERS)
def test_a_header_comes_back(header: RecordHeader):
    data = header.pack(SECRET)
    assert RecordHeader.unpack(data, SECRET) == header == RecordHeader.unpack(data + b"more", SECRET)
    assert len(data) == header.header_nbytes and len(data) % ALIGNMENT == 0
    assert header.offsets[0] == header.offset + len(data) and all(offset % ALIGNMENT == 0 for offset in header.offsets)
    ends = [offset + part.nbytes for offset, part in zip(header.offsets, header.parts, strict=False)]
    assert all(0 <= begin - end < ALIGNMENT for end, begin in zip(ends, header.offsets[1:], strict=True))


@given(HEADERS, st.data())
def test_an_altered_header_is_none(header: RecordHeader, data: st.DataObject):
    packed = bytearray(header.pack(SECRET))
    used = 112 + 16 * len(header.parts) + len(header.tokens)
    packed[data.draw(st.integers(0, used - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StoreError):
        RecordHeader.unpack(bytes(packed), SECRET)


@given(HEADERS, st.data())
def test_a_header_that_is_cut_off_is_none(header: RecordHeader, data: st.DataObject):
    packed = header.pack(SECRET)
    with pytest.raises(StoreError):
        RecordHeader.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))], SECRET)


@given(st.binary(max_size=300))
def test_strange_bytes_are_no_header(data: bytes):
    for text in (data, b"QKVBLOCK" + data, b"QKVBLOCK" + data.ljust(ALIGNMENT, b"\1")):
        with pytest.raises(StoreError):
            RecordHeader.unpack(text, SECRET)


@given(HEADERS)
def test_a_header_under_another_secret_is_none(header: RecordHeader):
    with pytest.raises(StoreError):
        RecordHeader.unpack(header.pack(SECRET), b"t" * 32)


def test_a_header_claims_no_more_than_it_may():
    with pytest.raises(ValueError, match="8193 tokens"):
        pack_tokens([1] * (MAX_TOKENS + 1))
    with pytest.raises(ValueError, match="0 tokens"):
        pack_tokens([])
    many = RecordHeader(1, 0, bytes(32), bytes(32), pack_tokens([1]), (PartHeader(0, 0, 0, 1),) * (MAX_PARTS + 1))
    with pytest.raises(StoreError):
        RecordHeader.unpack(many.pack(SECRET), SECRET)


def test_fields_stand_where_the_page_says():
    """docs/kv_store.md has a table of each header."""
    parts = PartHeader(0, -1, 7, 700), PartHeader(1, 0, 8, 4096)
    data = RecordHeader(3, 8192, b"k" * 32, b"p" * 32, pack_tokens([5, 6]), parts).pack(SECRET)
    assert data[:8] == b"QKVBLOCK" and unpack_from("<QQII", data, 24) == (3, 8192, 2, 2)
    assert (data[48:80], data[80:112]) == (b"k" * 32, b"p" * 32)
    assert unpack_from("<HhIQ", data, 112) == parts[0] and unpack_from("<HhIQ", data, 128) == parts[1]
    assert unpack_from("<2q", data, 144) == (5, 6) and not any(data[160:]) and len(data) == ALIGNMENT
    assert data[8:24] == signed(data[:8] + bytes(16) + data[24:160])
    data = SegmentHeader(9, NAMESPACE).pack(SECRET)
    text = NAMESPACE.encode()
    assert data[:8] == b"QKVSTORE" and unpack_from("<IIQ", data, 24) == (VERSION, len(text), 9)
    assert data[40:].rstrip(b"\0") == text and data[8:24] == signed(data[:8] + bytes(16) + data[24 : 40 + len(text)])


def test_a_table_stands_where_the_page_says():
    pieces = [
        StoredPiece(b"k" * 32, 9, 8192, 16, ((0, -1, 700), (1, 0, 4096))),
        StoredPiece(b"l" * 32, 9, 24576, 5, ()),
    ]
    data = Contents(40960, pieces).pack(9, SECRET)
    assert data[:32] == b"k" * 32 and unpack_from("<QII", data, 32) == (8192, 16, 2)
    assert unpack_from("<HhQHhQ", data, 48) == (0, -1, 700, 1, 0, 4096) and data[72:104] == b"l" * 32
    page = data[ALIGNMENT:]
    assert page[:8] == b"QKVINDEX" and unpack_from("<QQQ", page, 24) == (9, 40960, 120) and len(page) == ALIGNMENT
    assert page[8:24] == signed(page[:8] + bytes(16) + page[24:48] + data[:120])


PIECES = st.lists(
    st.builds(
        StoredPiece,
        *(KEY, st.just(9), st.integers(0, 2**40), st.integers(1, MAX_TOKENS)),
        st.lists(st.tuples(U16, st.integers(-9, 9), U63), min_size=1, max_size=MAX_PARTS).map(tuple),
    ),
    max_size=90,
)


@given(PIECES, st.integers(0, 9), st.data())
def test_a_table_comes_back_and_an_altered_one_does_not(pieces: list[StoredPiece], pages: int, data: st.DataObject):
    contents = Contents(pages * ALIGNMENT, pieces)
    packed = contents.pack(9, SECRET)
    nbytes = contents.end + len(packed)
    table_nbytes = sum(map(entry_nbytes, pieces))
    assert len(packed) == contents_nbytes(table_nbytes) <= most_contents_nbytes(len(pieces))
    with tempfile.TemporaryFile() as file:
        fd = file.fileno()
        os.pwrite(fd, packed, contents.end)
        assert Contents.read(fd, 9, nbytes, SECRET) == contents
        assert Contents.read(fd, 8, nbytes, SECRET) is None and Contents.read(fd, 9, nbytes, b"other") is None
        assert Contents.read(fd, 9, nbytes - ALIGNMENT, SECRET) is None and Contents.read(fd, 9, 3, SECRET) is None
        used = [*range(table_nbytes), *range(len(packed) - ALIGNMENT, len(packed) - ALIGNMENT + 48)]
        place = contents.end + data.draw(st.sampled_from(used))
        os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ data.draw(st.integers(1, 255))]), place)
        assert Contents.read(fd, 9, nbytes, SECRET) is None


def signed(header: bytes) -> bytes:
    return hashlib.blake2b(header, key=SECRET, digest_size=16, person=b"qkv store header").digest()


def test_keys_differ_by_namespace_and_secret():
    digests = {
        key_digest(key, space, secret) for key in (b"a", b"b") for space in (b"x", b"y") for secret in (b"1", b"2")
    }
    assert len(digests) == 8 and {len(digest) for digest in digests} == {32}


@given(st.lists(FITTING, max_size=6), st.integers(0, 5000), st.booleans())
def test_a_walk_finds_all_records_and_where_they_end(records, torn: int, has_gap: bool):
    with tempfile.TemporaryFile() as file:
        fd, header = file.fileno(), SegmentHeader(5, NAMESPACE)
        os.pwrite(fd, header.pack(SECRET), 0)
        end, written = header.nbytes, []
        for number, (parts, tokens, key) in enumerate(records):
            if has_gap and number == 1:
                end += 3 * ALIGNMENT
            record = RecordHeader(5, end, key, key, tokens, tuple(parts))
            os.pwrite(fd, record.pack(SECRET), end)
            os.ftruncate(fd, record.end)
            written.append(record)
            end = record.end
        os.pwrite(fd, b"x" * torn, end)
        assert SegmentHeader.read(fd, SECRET) == header
        scan = SegmentScan(fd, header, SECRET, end + torn)
        assert list(scan.records()) == written
        assert (scan.end, scan.tail_nbytes, scan.num_gaps) == (end, torn, int(has_gap and len(records) > 1))
        if written:
            rest = SegmentScan(fd, header, SECRET, end + torn, written[0].end)
            assert list(rest.records()) == written[1:]
            short = SegmentScan(fd, header, SECRET, end - 1)
            assert list(short.records()) == written[:-1], "a record that is cut off"


def test_a_walk_skips_what_is_not_of_the_place_or_the_namespace():
    place = SegmentHeader(5, NAMESPACE).nbytes
    good = RecordHeader(5, place, bytes(32), bytes(32), pack_tokens([1]), (PartHeader(0, 0, 1, 5000),))
    part = good.parts[0]
    wrong = [
        *(replace(good, segment=4), replace(good, offset=place + ALIGNMENT)),
        *(replace(good, parts=(part._replace(**change),)) for change in ({"nbytes": 4999}, {"rung": 1}, {"group": 2})),
        *(replace(good, parts=(part, part)), replace(good, parts=(PartHeader(1, 0, 1, 4096), part))),
    ]
    for record in (good, *wrong):
        with tempfile.TemporaryFile() as file:
            os.pwrite(file.fileno(), record.pack(SECRET), place)
            os.ftruncate(file.fileno(), place + 40_000)
            scan = SegmentScan(file.fileno(), SegmentHeader(5, NAMESPACE), SECRET, place + 40_000)
            assert list(scan.records()) == ([good] if record is good else [])


@given(st.integers(0, 2**63 - 1), st.integers(0, 700), st.integers(1, 255))
def test_an_altered_segment_header_is_none(number: int, place: int, change: int):
    header = SegmentHeader(number, NAMESPACE)
    packed = bytearray(header.pack(SECRET))
    used = len(bytes(packed).rstrip(b"\0"))
    packed[place % used] ^= change
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), packed, 0)
        with pytest.raises(StoreError):
            SegmentHeader.read(file.fileno(), SECRET)
        os.ftruncate(file.fileno(), place % used)
        os.pwrite(file.fileno(), header.pack(SECRET)[: place % used], 0)
        with pytest.raises(StoreError):
            SegmentHeader.read(file.fileno(), SECRET)


def test_a_long_namespace_fits():
    """Its header takes several pages."""
    group = StoredGroup(tuple(StoredRung(f"rung {n:0300}", n + 1) for n in range(40)), ())
    header = SegmentHeader(1, Namespace(MODEL, "long", "ab" * 32, 128, (group,)))
    assert header.nbytes > 3 * ALIGNMENT
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), header.pack(SECRET), 0)
        assert SegmentHeader.read(file.fileno(), SECRET) == header


def test_a_namespace_is_made_of_a_spec():
    slots = (RequestSlot("sink", 32, 640, 99),)
    group = GroupSpec((0, 1), 128, (RungSize("a", 4000, 16.0), RungSize("b", 100, 4.0)), (0, 1), slots, RecentWindow(0))
    space = Namespace.of(MODEL, KVSpec("mine", (group,), False, 0), "ab")
    assert (space.ladder, space.layout, space.piece_tokens) == ("mine", "ab", 128)
    assert [space.nbytes(0, rung) for rung in (0, 1, 2, -1, -2)] == [4000, 100, None, 640, None]
    assert space.nbytes(1, 0) is None and space.nbytes(-1, 0) is None
    assert space.largest_record == 2 * ALIGNMENT and Namespace.decode(space.encode()) == space
    with pytest.raises(ConfigError, match="random weights"):
        Namespace.of(msgspec.structs.replace(MODEL, weights=None), KVSpec("mine", (group,), False, 0), "ab")


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [
        ((), 16),
        ((StoredGroup((), ()),), 16),
        ((StoredGroup((StoredRung("a", 0),), ()),), 16),
        ((StoredGroup((StoredRung("a", 1),), (StoredRung("b", -1),)),), 16),
        ((StoredGroup((StoredRung("a", 1),), ()),) * 3, 16),
        ((StoredGroup((StoredRung("a", 1),), ()),), 0),
        ((StoredGroup((StoredRung("a", 1),), ()),), MAX_TOKENS + 1),
    ],
)
def test_a_namespace_of_nothing_is_refused(groups: tuple[StoredGroup, ...], tokens: int):
    with pytest.raises(ValueError):
        Namespace(MODEL, "x", "y", tokens, groups)
