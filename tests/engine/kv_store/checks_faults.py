"""Checks of what a store does when the disk, or a call, fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from .checks_folder import filled, found, opened
from .code import Code
from .logs import warnings
from .pieces import blocks, piece, put, read

CALLS = ("pwritev", "fdatasync", "fsync", "ftruncate", "unlink", "open", "pread", "preadv", "listdir", "stat")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)


@contextmanager
def replaced(name: str, new: Callable[..., Any]) -> Iterator[None]:
    """``os.name`` is ``new`` in the block."""
    old = getattr(os, name)
    setattr(os, name, new)
    try:
        yield
    finally:
        setattr(os, name, old)


@contextmanager
def failing(name: str, first: int, last: float, code: int) -> Iterator[list[int]]:
    """Calls of ``os.name`` from the ``first`` to the ``last``, counted from 0, fail in the block."""
    old, calls, failed = getattr(os, name), count(), list[int]()

    def call(*args: Any, **options: Any) -> Any:
        number = next(calls)
        if first <= number <= last:
            failed.append(number)
            raise OSError(code, os.strerror(code))
        return old(*args, **options)

    with replaced(name, call):
        yield failed


def check_short_reads_and_writes_go_on(code: Code, path: Path) -> None:
    write, read_into = os.pwritev, os.preadv
    with (
        replaced("pwritev", lambda fd, parts, offset: write(fd, [parts[0][:1000]], offset)),
        replaced("preadv", lambda fd, parts, offset: read_into(fd, [parts[0][:777]], offset)),
    ):
        filled(code, path)
        with opened(code, path) as store:
            assert found(store) == list(range(9))


def check_a_call_that_raises_harms_nobody(code: Code, path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("a callback's own bug")

    with opened(code, path) as store:
        assert store.put(piece(1), blocks(piece(1).key), fail) and store.flush()
        assert put(store, 2) and store.flush() and found(store) == [1, 2]


def check_a_full_disk_ends_writing_and_no_reading(code: Code, path: Path) -> None:
    with opened(code, path) as store, warnings() as told:
        for number in range(3):
            put(store, number)
        assert store.flush()
        with failing("pwritev", 0, 99, errno.ENOSPC) as failed:
            for number in range(3, 9):
                put(store, number)
            store.flush()
        assert len(failed) == 1, "it goes on writing"
        stats = store.stats()
        assert not stats.is_writable and "No space" in stats.problem and stats.num_dropped == 6
        assert [line for line in told if "No space" in line] == told and len(told) == 1
        assert found(store) == [0, 1, 2] and not put(store, 10)
    with warnings() as told, opened(code, path) as store:
        assert found(store) == [0, 1, 2] and put(store, 10) and told == []


def check_a_segment_that_cannot_begin_leaves_no_file(code: Code, path: Path) -> None:
    write = os.pwritev

    def torn(fd: int, parts: Any, offset: int) -> int:
        write(fd, [parts[0][:1000]], offset)
        raise OSError(errno.ENOSPC, "full")

    with opened(code, path) as store:
        with replaced("pwritev", torn):
            assert put(store, 1) and not store.flush() and not store.stats().is_writable
        assert list(path.glob("*.kv")) == [] and store.stats().nbytes == 0


def check_a_torn_write_is_taken_back(code: Code, path: Path) -> None:
    """A record that the disk took half of, with an error then, leaves nothing."""
    write = os.pwritev

    def torn(fd: int, parts: Any, offset: int) -> int:
        if offset < 20_000:
            return write(fd, parts, offset)
        write(fd, parts[:2], offset)
        raise OSError(errno.ENOSPC, "full")

    with opened(code, path) as store:
        put(store, 1)
        store.flush()
        nbytes = store.stats().nbytes
        with replaced("pwritev", torn):
            put(store, 2)
            put(store, 3)
            store.flush()
        assert sum(file.stat().st_size for file in path.glob("*.kv")) == nbytes
    with warnings() as told, opened(code, path) as store:
        assert found(store) == [1] and told == []


def check_the_disk_may_fail_at_any_call(code: Code, path: Path) -> None:
    """Once or for good: no error comes out, no wrong bytes, each caller is told, and a restart finds what it should."""
    folders = count()
    for name in CALLS:
        for first in range(0, 10 if name in ("pread", "open") else 5):
            last = 10**9 if first % 2 else first
            fail_once(code, path.with_name(f"store-{next(folders)}"), name, first, last)


def fail_once(code: Code, path: Path, name: str, first: int, last: int) -> None:
    filled(code, path, range(3))
    store, told = opened(code, path), list[int]()
    accepted = list[int]()
    with failing(name, first, last, ERRORS[(first + len(name)) % 3]), warnings() as lines:
        for number in range(3, 36):
            own = piece(number)
            if store.put(own, blocks(own.key), lambda number=number: told.append(number)):
                accepted.append(number)
            if number % 4 == 0:
                store.flush()
            read(store, piece(number % 7))
        store.stats()
        store.close()
    assert told == accepted, name
    assert len([line for line in lines if "nothing more is written" in line]) <= 1
    with opened(code, path) as again:
        assert again.stats().is_writable and put(again, 99) and again.flush()
        assert set(found(again, range(100))) <= {0, 1, 2, 99, *accepted} and 99 in found(again, range(100))


def check_opening_fails_in_words(code: Code, path: Path) -> None:
    """Whatever call fails at opening, it is a ``ConfigError``, or the store opens and goes on."""
    from qkv_engine.errors import ConfigError

    for name in (*CALLS, "mkdir", "write", "rename", "fstat", "pwrite"):
        for first in range(4):
            own = path.with_name(f"{name}-{first}")
            if first % 2:
                filled(code, own)
            try:
                with failing(name, first // 2, 10**9, errno.EIO):
                    store = opened(code, own)
                    put(store, 50)
                    store.flush()
                    found(store)
                    store.close()
            except ConfigError as error:
                assert "kv_store=" in str(error)
            with opened(code, own) as store:
                assert store.stats().is_writable, f"{name}: the lock is held"
                assert put(store, 51) and store.flush() and 51 in found(store, range(60))


def check_damaged_records_are_not_handed_on(code: Code, path: Path) -> None:
    """They would get a new checksum."""
    with opened(code, path) as store, warnings() as told:
        for number in range(4):
            put(store, number)
            assert store.flush() and read(store, piece(number)) is not None
        place = store.find(piece(0).key)
        with (path / f"{place.segment:016x}.kv").open("r+b") as file:
            file.seek(place.offset + 6000)
            file.write(b"damage")
        for number in range(100, 140):
            put(store, number)
            assert store.flush()
        assert found(store, range(4)) == [1, 2] and len(told) == 1 and store.stats().num_damaged == 1
