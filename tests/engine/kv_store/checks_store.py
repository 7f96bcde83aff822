"""Checks of a store: what it keeps and gives up, its queue and its threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checks_faults import replaced
from .checks_folder import filled, found, opened
from .code import Code
from .logs import warnings
from .pieces import BOTH, blocks, buffers, contents, piece, put, read


def check_what_is_put_is_found_again(code: Code, path: Path) -> None:
    """Also after a restart, in the order of groups and on the rungs that were given."""
    cases = {1: BOTH, 2: ((0, 1), (1, 0)), 3: ((0, -1), (1, -1)), 4: ((1, 0),), 5: ((0, 0),)}
    with opened(code, path) as store:
        for number, rungs in cases.items():
            assert put(store, number, rungs)
        assert store.flush()
        for number, rungs in cases.items():
            assert read(store, piece(number)) == dict(rungs)
        stats = store.stats()
        assert (stats.num_pieces, stats.num_written, stats.num_read, stats.num_found) == (5, 5, 5, 5)
        nbytes = sum(len(contents(b"", *part)) for rungs in cases.values() for part in rungs)
        assert (stats.num_missed, stats.num_known, stats.num_dropped, stats.read_nbytes) == (0, 0, 0, nbytes)
        assert stats.nbytes == sum(file.stat().st_size for file in path.glob("*.kv")) == stats.written_nbytes + 4096
        assert store.find(piece(6).key) is None and store.stats().num_missed == 1
    with opened(code, path) as store:
        for number, rungs in cases.items():
            assert read(store, piece(number)) == dict(rungs)
            assert store.find(piece(number).key).num_tokens == 16


def check_a_better_record_takes_the_place_of_another(code: Code, path: Path) -> None:
    """One that has all groups, none of them narrower. Also after a restart."""
    steps: list[tuple[tuple[tuple[int, int], ...], bool]] = [
        (((0, 1),), True),
        (((0, 1),), False),
        (((1, 0),), False),
        (((0, 1), (1, 0)), True),
        (((0, 1),), False),
        (((0, 0),), False),
        (BOTH, True),
        (((0, 1), (1, 0)), False),
        (BOTH, False),
    ]
    with opened(code, path) as store:
        for rungs, is_taken in steps:
            assert put(store, 1, rungs) == is_taken and store.flush()
        assert store.stats().num_known == 6 and store.stats().num_pieces == 1
    with opened(code, path) as store:
        assert read(store, piece(1)) == dict(BOTH)


def check_tokens_and_parents_are_compared(code: Code, path: Path) -> None:
    filled(code, path)
    with opened(code, path) as store:
        for wrong in ({"tokens": [98] * 16}, {"tokens": piece(1).tokens[:-1]}, {"parent": piece(2).key}):
            stored, asked = store.find(piece(1).key), piece(1)._replace(**wrong)
            assert not store.read(stored, asked, buffers(stored)), wrong
            store.close()
            store = opened(code, path)
        stored = store.find(piece(1).key)
        assert not store.read(stored, piece(2), buffers(stored)), "the record of another key"
        assert found(store) == list(range(9))
        store.close()


def check_blocks_of_other_sizes_are_refused(code: Code, path: Path) -> None:
    with opened(code, path) as store:
        own = piece(1)
        good = blocks(own.key)
        short = good[0]._replace(data=good[0].data[:-1])
        words = good[1]._replace(data=good[1].data.cast("I"))
        wrong = [
            *([], [short, good[1]], [good[1], good[0]], [good[0], good[0]], [good[0]._replace(rung=1)]),
            *([good[0]._replace(group=2)], [good[0]._replace(group=-1)], [good[0]._replace(rung=-2)], [words]),
        ]
        calls: list[Callable[[], Any]] = [lambda each=each: store.put(own, each) for each in wrong]
        calls += [lambda: store.put(own._replace(key=b"short"), good), lambda: store.put(own._replace(tokens=[]), good)]
        calls += [lambda: store.put(own._replace(tokens=[1] * 17), good)]
        assert store.put(own, good) and store.flush()
        stored = store.find(own.key)
        sizes: list[list[memoryview]] = [[], buffers(stored)[:1], [memoryview(bytearray(9)) for _ in range(2)]]
        sizes += [[memoryview(bytes(buffer)) for buffer in buffers(stored)]]
        calls += [lambda each=each: store.read(stored, own, each) for each in sizes]
        for number, call in enumerate(calls):
            try:
                call()
            except ValueError:
                continue
            raise AssertionError(f"call {number} was taken")
        assert read(store, own) == dict(BOTH)


def check_reads_in_the_background(code: Code, path: Path) -> None:
    filled(code, path)
    store = opened(code, path)
    stored = [store.find(piece(number).key) for number in range(9)]
    room = [buffers(each) for each in stored]
    results = [store.fetch(each, piece(n), room[n]) for n, each in enumerate(stored)]
    for number, result in enumerate(results):
        assert result.result(10) is True
        assert [bytes(b) for b in room[number]] == [contents(piece(number).key, *part) for part in BOTH]
    store.close()
    assert store.fetch(stored[0], piece(0), room[0]).result(10) is False


def check_a_closed_store_is_silent(code: Code, path: Path) -> None:
    filled(code, path)
    store = opened(code, path)
    stored = store.find(piece(1).key)
    with warnings() as told:
        store.close()
        store.close()
        assert store.find(piece(1).key) is None and not store.read(stored, piece(1), buffers(stored))
        assert not put(store, 20) and not store.stats().is_writable
        store.refresh()
        store.flush()
    assert told == []
    with opened(code, path) as store:
        assert found(store, range(30)) == list(range(9))


def check_the_queue_is_bounded_and_all_are_told(code: Code, path: Path) -> None:
    """While the disk stands still: what the queue has no room for is dropped, and nobody waits."""
    go, write, begun = threading.Event(), os.pwritev, threading.Event()

    def slow(*args: Any) -> int:
        begun.set()
        assert go.wait(20)
        return write(*args)

    nbytes = sum(len(block.data) for block in blocks(b""))
    with opened(code, path, max_queued_nbytes=3 * nbytes) as store:
        told, accepted = list[int](), list[int]()
        store.flush()
        with replaced("pwritev", slow):
            try:
                for number in range(8):
                    own = piece(number)
                    if store.put(own, blocks(own.key), lambda number=number: told.append(number)):
                        accepted.append(number)
                assert begun.wait(10) and accepted == [0, 1, 2]
                stats = store.stats()
                assert (stats.num_dropped, stats.queued_nbytes, stats.num_pieces) == (5, 3 * nbytes, 0)
                assert not put(store, 1) and store.stats().num_known == 1, "it waits to be written"
                assert told == [] and found(store) == [] and not store.flush(0.05)
            finally:
                go.set()
            assert store.flush()
        assert told == accepted == found(store) and store.stats().queued_nbytes == 0
        assert put(store, 7) and store.flush() and found(store) == [0, 1, 2, 7]


def check_one_block_may_be_larger_than_the_queue(code: Code, path: Path) -> None:
    """And what waits for it to reach the disk does, although the queue is full."""
    write, sync, calls = os.pwritev, os.fdatasync, list[str]()

    def slow(*args: Any) -> int:
        time.sleep(0.1)
        calls.append("write")
        return write(*args)

    with opened(code, path, max_queued_nbytes=1) as store:
        with replaced("pwritev", slow), replaced("fdatasync", lambda fd: (calls.append("sync"), sync(fd))):
            assert put(store, 1) and store.flush() and calls[-1] == "sync"
        assert found(store) == [1]


def check_close_writes_what_waits(code: Code, path: Path) -> None:
    told = list[int]()
    with opened(code, path) as store:
        for number in range(9):
            own = piece(number)
            assert store.put(own, blocks(own.key), lambda number=number: told.append(number))
    assert told == list(range(9))
    with opened(code, path) as store:
        assert found(store) == list(range(9))


def check_records_in_use_are_handed_on(code: Code, path: Path) -> None:
    """Those that were read or offered again since; the others go, the oldest first."""
    with opened(code, path) as store:
        for number in range(120):
            put(store, number)
            store.flush()
            assert read(store, piece(0)) is not None
            if number >= 1:
                assert not put(store, 1), "it is there"
        has = found(store, range(120))
        assert has[:2] == [0, 1] and 119 in has and 2 not in has
        assert has[2:] == list(range(has[2], 120)), "a newer record went before an older one"
        stats = store.stats()
        assert stats.num_handed_on > 5 and stats.num_written == 120 + stats.num_handed_on
        assert stats.num_pieces == len(has) and stats.num_evicted == 120 - len(has)


def check_a_use_counts_once(code: Code, path: Path) -> None:
    """A record that is used no more is handed on once, and goes the next time."""
    with opened(code, path) as store:
        for number in range(120):
            put(store, number)
            store.flush()
            if number < 2:
                assert read(store, piece(0)) is not None
        assert store.find(piece(0).key) is None and store.stats().num_handed_on == 1


def check_what_is_taken_out_is_gone(code: Code, path: Path) -> None:
    """Also what waits to be written, and after a restart; nobody is warned, and others stay."""
    with opened(code, path) as store:
        for number in range(3):
            assert put(store, number)
        store.take_out(piece(0).key)
        assert store.flush()
        store.take_out(piece(1).key)
        store.take_out(piece(9).key)
        assert store.flush() and found(store, range(3)) == [2]
        assert store.lacks(piece(1).key, dict(BOTH)) and not store.lacks(piece(2).key, dict(BOTH))
    for _ in range(2):
        with warnings() as told, opened(code, path) as store:
            assert found(store, range(3)) == [2] and not told
            store.take_out(piece(2).key)  # from a full segment
            assert store.flush() and found(store, range(3)) == [] and put(store, 2) and store.flush()


def check_what_is_let_age_goes_with_its_segment(code: Code, path: Path) -> None:
    """However often it was used."""
    with opened(code, path) as store:
        assert put(store, 0) and put(store, 1) and store.flush()
        assert read(store, piece(0)) is not None and read(store, piece(1)) is not None
        store.let_age(piece(0).key)
        fill(store, 100, 40)
        assert store.find(piece(0).key) is None and store.stats().num_handed_on == 1


def check_a_place_that_was_written_again_is_a_miss(code: Code, path: Path) -> None:
    """Also if the tokens are the same: a segment was deleted, and a new one of its number has another salt's record."""
    one = piece(1)
    other = one._replace(key=bytes(reversed(one.key)))
    with opened(code, path) as store:
        assert store.put(one, blocks(one.key)) and store.flush()
    with opened(code, path, read_only=True) as reader:
        stored = reader.find(one.key)
        for file in path.glob("*.kv"):
            file.unlink()
        with opened(code, path) as store:
            assert store.put(other, blocks(other.key)) and store.flush()
            place = store.find(other.key)
            assert (place.segment, place.offset) == (stored.segment, stored.offset)
        assert not reader.read(stored, one, buffers(stored)), "the blocks of another salt"


def check_the_beginning_of_a_prefix_is_handed_on_first(code: Code, path: Path) -> None:
    """Of records that were used at about the same time; those that were used later come before."""
    with opened(code, path) as store:
        for number in range(4):
            put(store, number)
        assert store.flush()
        for number in (3, 2, 1, 0):
            assert read(store, piece(number)) is not None
        fill(store, 100, 8)
        assert read(store, piece(3)) is not None
        fill(store, 120, 25)
        assert found(store, range(4)) == [0, 3]


def fill(store: Any, first: int, number: int) -> None:
    """Puts pieces one after the other."""
    for each in range(first, first + number):
        assert put(store, each) and store.flush()


def check_a_full_segment_opens_by_its_table(code: Code, path: Path) -> None:
    """Of its records no header is read, and a torn or altered table is done without."""
    filled(code, path)
    for kind in ("sound", "altered", "torn"):
        reads, read_at = list[int](), os.pread
        for file in path.glob("*.kv"):
            data = bytearray(file.read_bytes())
            if kind == "altered":
                data[-8192] ^= 1
            file.write_bytes(data[: len(data) - 4096 * (kind == "torn")])

        def counted(fd: int, number: int, offset: int, reads: list[int] = reads, at: Any = read_at) -> bytes:
            reads.append(offset)
            return at(fd, number, offset)

        with replaced("pread", counted), warnings() as told:
            store = opened(code, path)
        segments = len(list(path.glob("*.kv")))
        assert (len(reads) <= 4 * segments + 2) == (kind == "sound"), "headers are read one by one"
        assert len(told) == (0 if kind == "sound" else segments), told
        assert found(store) == list(range(9))
        store.close()
        for file in path.glob("*.kv"):
            file.unlink()
        filled(code, path)
