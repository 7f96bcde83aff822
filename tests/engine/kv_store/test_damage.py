"""Damaged stores: whatever is altered, no wrong byte comes back and nothing is raised."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from qkv_engine.kv_store.store import KVStore

from .logs import warnings
from .model import KINDS, STEPS, alter
from .pieces import NAMESPACE, SMALL, piece, put, read

NUMBERS = range(20)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a few segments, the last of which is still written."""
    path, draw = tmp_path_factory.mktemp("sound") / "store", random.Random(1)
    with KVStore(path, SMALL, NAMESPACE) as store:
        for number in NUMBERS:
            put(store, number, draw.choice(STEPS))
            store.flush()
        return Path(shutil.copytree(path, path.with_name("copy")))


def damage(folder: Path, draw: random.Random) -> list[str]:
    """Alters a few files; the names of those."""
    files = sorted(folder.iterdir())
    names = []
    for _ in range(draw.choice((1, 1, 2, 5))):
        file = draw.choice(files if draw.random() < 0.1 else [file for file in files if file.suffix == ".kv"])
        if not file.exists() or not file.stat().st_size:
            continue
        names.append(file.name)
        kind = draw.choice((*KINDS, *KINDS, "gone", "another", "noise all over"))
        if kind in KINDS:
            size = file.stat().st_size
            place = draw.choice((draw.randrange(size), draw.randrange(size) // 4096 * 4096 + draw.randrange(200)))
            alter(file, min(size - 1, place), kind)
        elif kind == "gone":
            file.unlink()
        elif kind == "another":
            other = draw.choice(files)
            file.write_bytes(other.read_bytes() if other.exists() else b"")
        else:
            file.write_bytes(draw.randbytes(file.stat().st_size))
    return names


def try_one(sound: Path, folder: Path, seed: int) -> int:
    """Opens a damaged copy and reads all of it; returns pieces found."""
    draw = random.Random(seed)
    shutil.copytree(sound, folder)
    names = damage(folder, draw)
    number = len(list(folder.glob("*.kv")))
    with warnings() as told, KVStore(folder, SMALL, NAMESPACE, read_only=draw.random() < 0.3) as store:
        found = sum(read(store, piece(n)) is not None for n in NUMBERS)
        assert len(told) == len(set(told)) <= (len(set(names)) if "secret" not in names else number)
        if store.stats().is_writable:
            assert put(store, 50) and store.flush() and read(store, piece(50)) is not None
    with KVStore(folder, SMALL, NAMESPACE) as again:
        assert sum(read(again, piece(n)) is not None for n in NUMBERS) == found
    shutil.rmtree(folder)
    return found


def try_many(sound: Path, tmp_path: Path, number: int) -> list[int]:
    return [try_one(sound, tmp_path / "damaged", seed) for seed in range(number)]


def test_two_hundred_damaged_stores(sound: Path, tmp_path: Path):
    found = try_many(sound, tmp_path, 200)
    assert max(found) == len(NUMBERS) and sum(found) > 100 * len(NUMBERS)


@pytest.mark.slow
def test_five_thousand_damaged_stores(sound: Path, tmp_path: Path, report: list[str]):
    found = try_many(sound, tmp_path, 5000)
    report.append(f"store: 5,000 damaged stores, {sum(found) / 5000 / len(NUMBERS):.0%} of the pieces found in them")
    assert sum(found) > 2500 * len(NUMBERS)
