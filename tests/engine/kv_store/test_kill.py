"""Processes killed while they write: what is found afterwards is intact, and what had been flushed is there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkv_engine.kv_store.store import KVStore

from .logs import warnings
from .pieces import LARGE_NAMESPACE, SMALL, piece, put, read

PROGRAM = Path(__file__).with_name("writer_program.py")
LIMIT = 32 * SMALL
NEWEST = 4  # pieces that the limit leaves in any case
AHEAD = 200  # more than any process writes between two flushes


def kill_one(folder: Path, seed: int, delay: float) -> tuple[int, int]:
    """Starts a process, kills it ``delay`` seconds after it opened the store, and looks.

    Returns the number of pieces found, and of segments that were cut off.
    """
    words = [sys.executable, str(PROGRAM), str(folder), str(seed)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "open\n", process.stderr.read()
        time.sleep(delay)
        process.kill()
        lines = process.stdout.read().splitlines()
        assert process.stderr.read() == ""
    flushed = [number for line in lines[-1:] for number in range(*map(int, line.split()[:2]))]
    newest = int(lines[-1].split()[1]) if lines else 1000 * seed
    with warnings() as told, KVStore(folder, LIMIT, LARGE_NAMESPACE) as store:
        stats = store.stats()
        assert stats.is_writable, "the lock of a killed process is held"
        found = {number for number in range(1000 * seed, newest + AHEAD) if read(store, piece(number)) is not None}
        written_after = len(found - set(range(newest)))
        assert set(flushed[-max(0, NEWEST - written_after) :]) <= found or written_after >= NEWEST
        assert store.stats().num_read == len(found)
        assert put(store, 7, namespace=LARGE_NAMESPACE) or read(store, piece(7)) is not None
        assert store.flush() and read(store, piece(7)) is not None
        assert all("its end is cut off" in line for line in told) and len(told) <= 1, told
    assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= LIMIT
    return len(found), len(told)


def kill_many(folder: Path, number: int) -> tuple[int, int]:
    """In one folder, which is begun anew now and then; returns the sums."""
    draw, found, cut = random.Random(number), 0, 0
    for seed in range(1, number + 1):
        delay = draw.choice((0.02, 0.1, 0.2)) * draw.random() + 0.001
        more = kill_one(folder / f"{seed // 25}", seed, delay)
        found, cut = found + more[0], cut + more[1]
    return found, cut


def test_killed_writers_leave_intact_records(tmp_path: Path):
    assert kill_many(tmp_path, 15)[0] > 15


@pytest.mark.slow
def test_five_hundred_killed_writers_leave_intact_records(tmp_path: Path, report: list[str]):
    found, cut = kill_many(tmp_path, 500)
    report.append(f"store: 500 writers killed, {cut} in a record; {found:,} pieces found intact afterwards")
    assert found > 500 and cut > 2
