"""``Engine.sleep`` and ``wake``: requests go on where they were, and the process's memory goes back meanwhile."""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from qkv_engine import (
    CapacityError,
    ConfigError,
    Engine,
    EngineDeadError,
    ModelError,
    RequestStream,
    SamplingParams,
    sleeping,
)
from qkv_engine.config import EngineConfig
from qkv_engine.intake import Intake
from qkv_engine.presets import resolve_kv
from qkv_engine.serving.submission import Submission
from qkv_engine.startup import start

from ..small_demo import BLOCK_NBYTES, small_demo
from .test_host_tier import CACHED, NUM_TOKENS, PROMPTS, greedy
from .test_resize import resident_nbytes, touch_all

MIB = 2**20
PROMPT = "Accounts: Ann 10, Bob 20. " * 40
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(small_demo(), kv="fp32", kv_memory=32 * MIB, host_memory=16 * MIB, num_threads=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _awake(engine: Engine) -> Iterator[None]:
    yield
    engine.wake()


def begun(engine: Engine, number: int) -> list[RequestStream]:
    """Streams of so many requests, each with a few tokens."""
    streams = [engine.stream(f"{index}: {PROMPT}", PARAMS) for index in range(number)]
    for stream in streams:
        while not next(stream).token_ids:
            pass
    return streams


def test_requests_go_on_where_they_were(engine: Engine):
    alone = engine.generate([f"{index}: {PROMPT}" for index in range(3)], PARAMS)
    engine.reset_stats()
    streams = begun(engine, 3)
    computed = engine.stats().prompt_tokens
    assert engine.sleep() and engine.is_asleep and engine.sleep()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 3, 0)
    assert stats.kv_bytes_total == stats.kv_bytes_used == stats.kv_bytes_cached == 0 < stats.host_bytes_used
    later = engine.stream("What is 6*7?", SamplingParams(temperature=0, max_tokens=8))
    engine.wake()
    engine.wake()
    assert not engine.is_asleep
    assert [list(stream)[-1].token_ids for stream in streams] == [output.token_ids for output in alone]
    assert list(later)[-1].finished
    stats = engine.stats()
    # Of each request the last block, which was not full, is computed again.
    assert stats.prompt_tokens - computed < 4 * 128 and stats.host_fetched_tokens > 3 * 500


def test_without_host_memory_all_is_computed_again():
    with Engine(small_demo(), kv_memory=8 * MIB, num_threads=1) as engine:
        alone = engine.generate(PROMPT, PARAMS)[0]
        stream = engine.stream(PROMPT, PARAMS)
        while not next(stream).token_ids:
            pass
        assert engine.sleep()
        engine.wake()
        assert list(stream)[-1].token_ids == alone.token_ids


def test_memory_goes_back(engine: Engine):
    touch_all(engine)
    before = resident_nbytes()
    engine.sleep()
    assert resident_nbytes() < before - 0.9 * (32 * MIB)
    engine.wake()
    assert engine.stats().kv_bytes_total == 32 * MIB


def test_nothing_holds_what_goes_back(engine: Engine):
    engine.generate("What is 6*7?", SamplingParams(max_tokens=2))
    runner = engine._started.core.runner
    held = [weakref.ref(x) for x in (runner.backend.steps.model, runner.backend, runner.cache.memory)]
    assert engine.sleep()
    assert [x() for x in held] == [None] * 3


def test_requests_that_sleep_are_aborted(engine: Engine):
    (stream,) = begun(engine, 1)
    engine.sleep()
    waiting = engine.stream(PROMPT, PARAMS, request_id="waits")
    engine.abort("waits")
    assert list(waiting)[-1].outputs[0].finish_reason == "abort"
    stream.close()
    assert engine.stats().num_waiting == 0
    engine.wake()
    assert engine.generate("What is 6*7?", SamplingParams(temperature=0, max_tokens=8))[0].finished


def test_a_size_that_is_under_way_is_reached(engine: Engine):
    streams = begun(engine, 4)
    asked = threading.Thread(target=lambda: engine.resize(18 * MIB))
    asked.start()
    asked.join(timeout=0.1)
    assert engine.sleep()
    asked.join()
    with pytest.raises(ConfigError, match="sleeps"):
        engine.resize(16 * MIB)
    engine.wake()
    assert 17 * MIB < engine.stats().kv_bytes_total <= 18 * MIB
    assert all(list(stream)[-1].finished for stream in streams)
    assert engine.resize(32 * MIB) == 32 * MIB


def test_what_fails_leaves_it_asleep(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    models = list[weakref.ref[object]]()

    def refuse(model: object, *_: object) -> None:
        models.append(weakref.ref(model))
        raise CapacityError("no memory", remedy="Wait")

    (stream,) = begun(engine, 1)
    engine.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(sleeping, "make_backend", refuse)
        with pytest.raises(CapacityError) as error:
            engine.wake()
        assert models[0]() is None and error.value.remedy == "Wait"
    assert engine.is_asleep and engine.stats().kv_bytes_total == 0
    engine.wake()
    assert list(stream)[-1].finished


def test_an_altered_checkpoint_does_not_wake(tmp_path: Path):
    folder = shutil.copytree(small_demo(), tmp_path / "model")
    weights, kept = folder / "model.safetensors", tmp_path / "kept"
    shutil.copy(weights, kept)
    with Engine(folder, kv_memory=16 * MIB, num_threads=1) as engine:
        engine.sleep()
        data = bytearray(weights.read_bytes())
        data[8 + int.from_bytes(data[:8], "little") :] = bytes(len(data) - 8 - int.from_bytes(data[:8], "little"))
        weights.write_bytes(data)
        with pytest.raises(ModelError, match="altered"):
            engine.wake()
        shutil.copy(kept, weights)
        engine.wake()
        assert engine.generate("What is 6*7?", SamplingParams(temperature=0, max_tokens=4))[0].finished


def test_random_weights_need_no_checkpoint(tmp_path: Path):
    shutil.copy(small_demo() / "config.json", tmp_path)
    with Engine(tmp_path, load_format="random", kv_memory=16 * MIB, num_threads=1) as engine:
        params = SamplingParams(temperature=0, max_tokens=4)
        expected = engine.generate([[5, 6]], params)[0].token_ids
        engine.sleep()
        engine.wake()
        assert engine.generate([[5, 6]], params)[0].token_ids == expected


def test_an_engine_that_sleeps_is_closed():
    engine = Engine(small_demo(), kv_memory=16 * MIB, num_threads=1)
    engine.sleep()
    stream = engine.stream(PROMPT, PARAMS)
    engine.close()
    with pytest.raises(EngineDeadError):
        list(stream)
    with pytest.raises(EngineDeadError):
        engine.wake()


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_no_time_is_refused(engine: Engine, timeout: float):
    with pytest.raises(ConfigError, match="timeout"):
        engine.sleep(timeout=timeout)
    assert not engine.is_asleep


@pytest.mark.slow
def test_many_times_beside_requests(engine: Engine):
    alone = engine.generate([f"{index}: {PROMPT}" for index in range(4)], PARAMS)
    streams = begun(engine, 4)
    for _ in range(10):
        engine.sleep()
        engine.wake()
        time.sleep(0.005)
    assert [list(stream)[-1].token_ids for stream in streams] == [output.token_ids for output in alone]


def test_what_wakes_it_comes_after_what_had_it_sleep(engine: Engine):
    engine._loop.call(lambda: (engine.sleep(), engine.wake()))  # both before the step in which it falls asleep
    engine.stats()
    assert not engine.is_asleep
    assert engine.generate("What is 6*7?", SamplingParams(temperature=0, max_tokens=4))[0].finished


def test_blocks_that_no_command_has_named_yet_come_back():
    """A step ahead that is empty but for what it fetches leaves it to the next one, before which the engine sleeps."""
    config = EngineConfig(
        model=small_demo(), kv=resolve_kv("bf16"), kv_memory=9 * BLOCK_NBYTES, host_memory=8 * MIB, num_threads=1
    )
    started = start(config)
    core, intake = started.core, Intake(started)

    def add(prompt: list[int], **options: object) -> Submission:
        submission = intake.streamed(prompt, greedy(**options), None, None)
        core.add(submission)
        return submission

    def rest() -> None:
        while core.has_work:
            core.step()

    first = [add(prompt) for prompt in PROMPTS[:1]]
    rest()
    for prompt in PROMPTS[1:]:
        add(prompt)
        rest()
    core.runs_ahead = True
    other = add([5, 6, 7], repetition_penalty=1.5)
    core.step()
    again = add(PROMPTS[0])
    core.step()
    assert core.space.has_copies and other.completions
    core.runs_ahead = False  # a CPU cannot go on from tokens that only it knows
    core.sleeper.begin()
    core.step()
    assert core.sleeper.is_asleep and not core.space.tables.store.live_blocks()
    started.waker.wake(core)
    rest()
    assert again.completions[0].request.token_ids == first[0].completions[0].request.token_ids
    assert again.completions[0].request.num_cached_tokens == CACHED  # none is computed again
    assert other.completions[0].request.num_output_tokens == NUM_TOKENS
