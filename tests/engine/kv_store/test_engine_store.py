"""Engines with a KV store: prefixes outlive the process, whatever happens to it or to the files; tokens are equal."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from qkv_engine import ConfigError, Engine, SamplingParams
from qkv_engine.device import host_disk
from qkv_engine.kv_store.store import KVStore, Piece

from ...small_demo import BLOCK_NBYTES, small_demo
from .asked import FULL, PROMPTS, answer, ask, make_engine
from .test_damage import damage

PROGRAM = Path(__file__).with_name("asking_program.py")
NUMBERS = range(len(PROMPTS))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers with ample memory and without a store."""
    with Engine(small_demo(), kv="bf16", kv_memory="32MiB", num_threads=1) as engine:
        return [answer(engine, number) for number in NUMBERS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store of all prompts, which an engine left."""
    path = tmp_path_factory.mktemp("full") / "store"
    with make_engine(path) as engine:
        for number in NUMBERS:
            answer(engine, number)
    yield path


def copy_of(full: Path, folder: Path) -> Path:
    return Path(shutil.copytree(full, folder))


def test_prefixes_outlive_the_engine(full: Path, folder: Path, expected: list[list[int]]):
    with make_engine(copy_of(full, folder)) as engine:
        outputs = [ask(engine, number) for number in NUMBERS]
        stats = engine.stats()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [FULL] * len(PROMPTS)
    assert [output.kv.stored_tokens for output in outputs] == [FULL] * len(PROMPTS)
    assert stats.store_hit_tokens == FULL * len(PROMPTS) and stats.store_failed == stats.store_dropped == 0
    assert stats.store_bytes_read == len(PROMPTS) * FULL // 128 * BLOCK_NBYTES and stats.store_bytes_written == 0
    assert stats.store_pieces == len(PROMPTS) * FULL // 128 and 0 < stats.store_bytes_used < stats.store_bytes_total


def test_nothing_is_shared_under_another_salt_or_arithmetic(full: Path, folder: Path):
    with make_engine(copy_of(full, folder)) as engine:
        assert ask(engine, 0, cache_salt="another").num_cached_tokens == 0
    for options in ({"kv": "auto"}, {"dtype": "bfloat16"}, {"weights": "int8"}):
        with make_engine(folder, **options) as engine:
            assert ask(engine, 0).num_cached_tokens == 0, options


def test_what_is_cached_reaches_the_disk_while_nothing_runs(folder: Path):
    with make_engine(folder, kv_memory="16MiB") as engine:
        answer(engine, 0)
        until = time.monotonic() + 60
        while engine.stats().store_pieces < FULL // 128:
            assert time.monotonic() < until, "nothing is written"
            time.sleep(0.02)


def test_a_second_engine_reads_alone(full: Path, folder: Path, expected: list[list[int]]):
    with make_engine(copy_of(full, folder)), make_engine(folder) as second:
        assert "only read: process" in second.describe()[3] and answer(second, 0) == expected[0]
        stats = second.stats()
    assert stats.store_hit_tokens == FULL and stats.store_bytes_written == 0


def test_a_disk_that_stands_still_holds_nobody_up(
    full: Path, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    goes_on, read = Event(), KVStore.read
    monkeypatch.setattr(KVStore, "read", lambda *args: goes_on.wait() and read(*args))
    monkeypatch.setattr(host_disk, "READ_SECONDS", 0.05)
    with make_engine(copy_of(full, folder)) as engine:
        assert [answer(engine, number) for number in NUMBERS] == expected
        assert engine.stats().store_hit_tokens == 0
        goes_on.set()
        assert [answer(engine, number) for number in NUMBERS] == expected


def is_of(piece: Piece, number: int) -> bool:
    """Whether a piece is one of a prompt."""
    return any(list(piece.tokens) == PROMPTS[number][at : at + 128] for at in range(0, FULL, 128))


@pytest.fixture
def first_prompt_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Reads of the first prompt have begun; they go on. Nothing is looked at but for news, or for those who come."""
    begun, goes_on, read = Event(), Event(), KVStore.read

    def slow(store: KVStore, stored: Any, piece: Piece, buffers: Any) -> bool:
        if is_of(piece, 0):
            begun.set()
            assert goes_on.wait(60)
        return read(store, stored, piece, buffers)

    monkeypatch.setattr(KVStore, "read", slow)
    monkeypatch.setattr(host_disk, "READ_SECONDS", 20.0)
    monkeypatch.setattr(host_disk, "LOOK_SECONDS", 20.0)
    yield begun, goes_on
    goes_on.set()


def test_who_waits_for_the_disk_holds_nobody_up(
    full: Path, folder: Path, expected: list[list[int]], first_prompt_hangs: tuple[Event, Event]
):
    begun, goes_on = first_prompt_hangs
    with make_engine(copy_of(full, folder)) as engine, ThreadPoolExecutor(1) as pool:
        first = pool.submit(answer, engine, 0)
        assert begun.wait(30)
        assert answer(engine, 1) == expected[1], "from the disk"
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finished
        assert not first.done()
        goes_on.set()
        assert first.result(30) == expected[0] and engine.stats().store_hit_tokens == 2 * FULL


def test_the_books_are_left_alone_while_the_disk_reads(
    full: Path, folder: Path, expected: list[list[int]], first_prompt_hangs: tuple[Event, Event]
):
    """Looking at them takes Python's lock, for which the readers wait."""
    begun, goes_on = first_prompt_hangs
    with make_engine(copy_of(full, folder)) as engine, ThreadPoolExecutor(1) as pool:
        before = next_step(engine)
        first = pool.submit(answer, engine, 0)
        assert begun.wait(30)
        time.sleep(0.3)  # sixty times as long as a call from another thread would wait
        assert next_step(engine) - before <= 10 and not first.done()
        goes_on.set()
        assert first.result(30) == expected[0]


def next_step(engine: Engine) -> int:
    return engine._alive.core.scheduler._num_steps


def test_recovery_keeps_the_disk(full: Path, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    with make_engine(copy_of(full, folder)) as engine:
        running = engine._alive.core
        step, fails = running.step, [True]

        def broken() -> None:
            step()
            if fails.pop() if fails else False:
                raise RuntimeError("on purpose")

        monkeypatch.setattr(running, "step", broken)
        assert [answer(engine, number) for number in NUMBERS] == expected
        assert not fails and engine.stats().store_hit_tokens >= FULL * (len(PROMPTS) - 1)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"prefix_caching": False, "host_memory": None}, "kv_store", "none are cached"),
        ({"kv_store_size": "1MiB"}, "kv_store_size", "too few blocks"),
        ({"kv_store": None, "kv_store_size": "1GiB"}, "kv_store_size", "Give kv_store"),
        ({"kv_store": 3}, "kv_store", "not a folder"),
        ({"model": "demo", "load_format": "random"}, "kv_store", "random weights"),
    ],
)
def test_refusals_name_the_option(folder: Path, options: dict[str, object], field: str, message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        make_engine(folder, **options).close()
    assert raised.value.field == field


def kill_one(folder: Path, seed: int, delay: float, expected: list[list[int]]) -> None:
    """Starts a process that asks, and kills it ``delay`` seconds after it was ready."""
    words = [sys.executable, str(PROGRAM), str(folder), str(seed)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.kill()
        lines = process.stdout.read().split("\n")[:-1]
    for line in lines:
        number, *tokens = map(int, line.split())
        assert tokens == expected[number]


@pytest.mark.slow
def test_killed_engines_leave_stores_that_give_equal_tokens(folder: Path, expected: list[list[int]], report: list[str]):
    draw, found = random.Random(5), 0
    for seed in range(24):
        kill_one(folder, seed, 3 * draw.random(), expected)
        with make_engine(folder) as engine:
            assert [answer(engine, number) for number in NUMBERS] == expected
            found += engine.stats().store_hit_tokens
    report.append(f"store: 24 engines killed; {found:,} tokens came from what they left, all answers equal")
    assert found


@pytest.mark.slow
def test_altered_stores_give_equal_tokens(full: Path, tmp_path: Path, expected: list[list[int]], report: list[str]):
    found = failed = 0
    for seed in range(40):
        folder = copy_of(full, tmp_path / f"{seed}")
        damage(folder, random.Random(seed))
        with make_engine(folder) as engine:
            assert [answer(engine, number) for number in NUMBERS] == expected
            stats = engine.stats()
            found, failed = found + stats.store_hit_tokens, failed + stats.store_failed
        shutil.rmtree(folder)
    report.append(f"store: 40 altered stores; {found:,} tokens read, {failed} pieces failed, all answers equal")
    assert found and failed
