"""Checks of who waits for whom: reads go before writes, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .checks_folder import filled, found, opened
from .code import Code
from .pieces import BOTH, blocks, buffers, contents, piece, put


@contextmanager
def reading(store: Any, number: int) -> Iterator[threading.Event]:
    """Piece ``number`` is being read in the block, until the event; then its bytes are checked."""
    goes_on, begun, stored = threading.Event(), threading.Event(), store.find(piece(number).key)
    room = buffers(stored)

    def ready() -> None:
        begun.set()
        assert_set(goes_on)

    result = store.fetch(stored, piece(number), room, ready)
    try:
        assert begun.wait(10)
        yield goes_on
    finally:
        goes_on.set()
    assert result.result(10) and [bytes(b) for b in room] == [contents(piece(number).key, *part) for part in BOTH]


def check_a_write_waits_for_reads(code: Code, path: Path) -> None:
    filled(code, path)
    with opened(code, path) as store:
        with reading(store, 1) as first, reading(store, 2) as second:
            assert put(store, 20) and not store.flush(0.05) and store.stats().num_written == 0
            first.set()
            assert not store.flush(0.05), "another one is read"
            second.set()
            assert store.flush(5), "nothing is read any more"
        with reading(store, 20):
            assert put(store, 21) and not store.flush(0.05)
        assert store.flush(5) and found(store, range(20, 30)) == [20, 21]


def check_reads_without_end_hold_writes_for_a_while(code: Code, path: Path) -> None:
    filled(code, path)
    with patch.object(code.store, "HELD_SECONDS", 1.0), opened(code, path) as store, reading(store, 1) as first:
        assert put(store, 20) and not store.flush(0.6)
        with reading(store, 2):
            first.set()  # there is no gap between them
            assert store.flush(0.8) and put(store, 21) and store.flush(5)


def check_nothing_is_held_back_at_the_end(code: Code, path: Path) -> None:
    filled(code, path)
    store, told, goes_on = opened(code, path), threading.Event(), threading.Event()
    stored = store.find(piece(1).key)
    result = store.fetch(stored, piece(1), buffers(stored), lambda: assert_set(goes_on))
    assert store.put(piece(20), blocks(piece(20).key), told.set) and not told.wait(0.05)
    closing = threading.Thread(target=store.close)
    closing.start()
    try:
        assert told.wait(5)
    finally:
        goes_on.set()
        closing.join(10)
    assert result.result(10) is False


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)
