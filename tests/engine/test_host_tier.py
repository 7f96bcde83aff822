"""Prefixes that left KV memory come back from the host: tokens as with ample memory, and hardly any computed again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from qkv_engine import CapacityError, ConfigError, Engine, RequestOutput, SamplingParams, startup
from qkv_engine.config import EngineConfig
from qkv_engine.device.host_memory import FileMemory
from qkv_engine.presets import PRESETS
from qkv_engine.scheduler import ScheduledBatch
from qkv_engine.serving import core as core_module

from ..small_demo import BLOCK_NBYTES, small_demo
from .test_mixed_precision import long_prompts

MIB = 2**20
LENGTH = 700  # tokens of a prompt, of which five full blocks are cached
NUM_BLOCKS = 5
CACHED = NUM_BLOCKS * 128
PROMPTS = [long_prompts(1, LENGTH, seed=seed)[0] for seed in range(4)]
NUM_TOKENS = 8


def greedy(num_tokens: int = NUM_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)


def ask(engine: Engine, prompt: list[int], num_tokens: int = NUM_TOKENS) -> RequestOutput:
    return engine.generate([prompt], greedy(num_tokens))[0]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The answers with ample memory."""
    with Engine(small_demo(), kv="bf16", kv_memory="32MiB") as engine:
        return ids([ask(engine, prompt) for prompt in PROMPTS])


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Memory for one prompt, and host memory for all."""
    with Engine(small_demo(), kv="bf16", kv_memory=7 * BLOCK_NBYTES, host_memory="8MiB") as engine:
        yield engine


def test_prompts_come_back_with_equal_tokens(engine: Engine, expected: list[list[int]]):
    assert ids([ask(engine, prompt) for prompt in PROMPTS]) == expected
    stats = engine.stats()
    assert stats.host_bytes_total == 8 * MIB and stats.host_bytes_fetched == stats.host_fetched_tokens == 0
    assert (
        stats.host_bytes_used == stats.host_bytes_written == stats.host_bytes_peak == stats.host_blocks * BLOCK_NBYTES
    )
    assert 3 * NUM_BLOCKS <= stats.host_blocks <= 4 * NUM_BLOCKS
    computed = stats.prompt_tokens
    again = [ask(engine, prompt) for prompt in PROMPTS]
    assert ids(again) == expected and [output.num_cached_tokens for output in again] == [CACHED] * 4
    stats = engine.stats()
    assert stats.prompt_tokens - computed == 4 * (LENGTH - CACHED)
    assert stats.host_fetched_tokens == 4 * CACHED and stats.host_bytes_fetched == 4 * NUM_BLOCKS * BLOCK_NBYTES
    assert stats.prefix_hits == {"dense16": 4 * CACHED} and stats.host_bytes_dropped == 0
    engine.reset_stats()
    stats = engine.stats()
    assert stats.host_bytes_fetched == stats.host_bytes_written == stats.host_fetched_tokens == 0 < stats.host_blocks


def test_idle_blocks_are_copied_while_nothing_runs_so_that_giving_them_up_costs_nothing():
    with Engine(small_demo(), kv="bf16", kv_memory=7 * BLOCK_NBYTES, host_memory="8MiB") as engine:
        ask(engine, PROMPTS[0])
        _wait_until(engine, lambda stats: stats.host_bytes_written == NUM_BLOCKS * BLOCK_NBYTES)
        core = engine._alive.core
        _wait_until(engine, lambda stats: not core.has_work)
        tier = core.space.prefix.host.tier  # type: ignore[union-attr]
        ask(engine, PROMPTS[1])
        assert tier.stats().out_nbytes == 0 < tier.stats().written_nbytes


def test_first_token_of_a_long_prompt_takes_few_computed_ones():
    long, *others = long_prompts(3, 2000)
    with Engine(small_demo(), kv="bf16", kv_memory=17 * BLOCK_NBYTES, host_memory="12MiB") as engine:
        cold = ask(engine, long)
        for prompt in others:
            ask(engine, prompt[:1500])
        computed = engine.stats().prompt_tokens
        warm = ask(engine, long)
        assert ids([warm]) == ids([cold]) and warm.num_cached_tokens == 15 * 128
        assert engine.stats().prompt_tokens - computed == 2000 - 15 * 128


def test_conversations_go_on_where_they_were(expected: list[list[int]]):
    """Three of four turns each, in memory for one of them."""
    with Engine(small_demo(), kv="bf16", kv_memory="32MiB") as ample:
        answers, _ = converse(ample)
    with Engine(small_demo(), kv="bf16", kv_memory=8 * BLOCK_NBYTES, host_memory="8MiB") as engine:
        found, cached = converse(engine)
        assert found == answers
        assert all(number >= length - 128 for length, number in cached)
        assert engine.stats().host_fetched_tokens > 0


def converse(engine: Engine) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """All answers, and for each later turn the tokens of the one before and those that were cached."""
    histories, answers, cached = [prompt[:300] for prompt in PROMPTS[:3]], list[list[int]](), list[tuple[int, int]]()
    for turn in range(4):
        for history in histories:
            length = len(history)
            history += long_prompts(1, 100, seed=turn)[0] if turn else []
            output = ask(engine, history)
            cached += [(length, output.num_cached_tokens)] * (turn > 0)
            answers.append(output.outputs[0].token_ids)
            history += output.outputs[0].token_ids
    return answers, cached


def test_blocks_come_back_at_the_bits_that_they_had():
    with Engine(small_demo(), kv="auto", kv_memory=8 * BLOCK_NBYTES, host_memory="8MiB") as engine:
        for prompt in PROMPTS:
            ask(engine, prompt)
        written = engine.stats().host_bytes_written
        again = [ask(engine, prompt) for prompt in PROMPTS]
        stats = engine.stats()
    assert [output.num_cached_tokens for output in again] == [32 + CACHED] * 4
    told = [output.kv.cached_tokens for output in again if output.kv is not None]
    assert all(tokens.get("int4", 0) + tokens.get("int8", 0) > 0 for tokens in told)
    assert 0 < written < 4 * NUM_BLOCKS * BLOCK_NBYTES and stats.host_fetched_tokens > 0


def test_preempted_requests_resume_without_computing_their_tokens_again(monkeypatch: pytest.MonkeyPatch):
    # Admission that looks at nothing, so that memory runs out and requests are preempted.
    monkeypatch.setattr("qkv_engine.kv.manager.KVManager.admits", lambda *args: True)
    prompts, params = long_prompts(6, 200), greedy(100)
    with Engine(small_demo(), kv="fp32", kv_memory="16MiB") as ample:
        alone = ids(ample.generate(prompts, params))
    recomputed = {}
    for host_memory in (None, "16MiB"):
        with Engine(
            small_demo(), kv="fp32", kv_memory=10 * 2 * BLOCK_NBYTES, max_model_len=500, host_memory=host_memory
        ) as engine:
            computed = _count_computed(engine, monkeypatch)
            assert ids(engine.generate(prompts, params)) == alone
            number = engine.stats().num_preemptions
            recomputed[host_memory] = sum(computed) - 6 * (200 + 100 - 1)
    assert number > 0 and recomputed["16MiB"] < 128 * number and 2 * recomputed["16MiB"] < (recomputed[None] or 0)


def _count_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step from now on."""
    scheduler, found = engine._alive.core.scheduler, list[int]()
    schedule = scheduler.schedule

    def counted() -> ScheduledBatch:
        batch = schedule()
        found.append(batch.num_tokens)
        return batch

    monkeypatch.setattr(scheduler, "schedule", counted)
    return found


def test_ranks_have_equal_parts_of_host_memory(expected: list[list[int]]):
    with Engine(
        small_demo(), kv="bf16", kv_memory=7 * BLOCK_NBYTES // 2, host_memory="8MiB", tensor_parallel=2
    ) as engine:
        assert "Host memory 8.0 MiB: 4,096 tokens of prefixes" in engine.describe()
        for _ in range(2):
            outputs = [ask(engine, prompt) for prompt in PROMPTS]
            assert ids(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [CACHED] * 4
        stats = engine.stats()
        assert stats.host_bytes_total == 8 * MIB and stats.host_fetched_tokens == 4 * CACHED
        assert stats.host_bytes_fetched == 4 * NUM_BLOCKS * BLOCK_NBYTES


@pytest.mark.parametrize("place", ["launch", "launch_moves"])
def test_a_broken_step_starts_over_on_an_empty_host(
    engine: Engine, expected: list[list[int]], place: str, monkeypatch: pytest.MonkeyPatch
):
    for prompt in PROMPTS[:3]:
        ask(engine, prompt)
    runner, calls = engine._alive.core.runner, 0
    work = getattr(runner, place)

    def broken(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if place == "launch" or calls < 3:
            monkeypatch.setattr(runner, place, work)
        raise KeyError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine._alive.core.recovery, "run_again", lambda batch, error: _raise(error))
        patch.setattr(runner, place, broken)
        assert ids([ask(engine, PROMPTS[0])]) == expected[:1]
    assert calls and engine.stats().host_blocks <= NUM_BLOCKS
    assert ids([ask(engine, prompt) for prompt in PROMPTS]) == expected
    again = [ask(engine, prompt) for prompt in PROMPTS]
    assert ids(again) == expected and [output.num_cached_tokens for output in again] == [CACHED] * 4


def _raise(error: Exception) -> None:
    raise error


def test_requests_may_be_aborted_while_their_blocks_come(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    for prompt in PROMPTS[:3]:
        ask(engine, prompt)
    monkeypatch.setattr(core_module, "COPY_RATE", 0.0)  # beside a step of another request a piece at a time
    before = engine.stats()
    with engine.stream(PROMPTS[3][:20], greedy(80)) as other:
        next(other)
        streams = [engine.stream(PROMPTS[0], greedy(), request_id=f"r{number}") for number in range(2)]
        _wait_until(engine, lambda stats: stats.host_fetched_tokens > before.host_fetched_tokens)
        assert engine.stats().host_fetched_tokens - before.host_fetched_tokens < CACHED, "all came at once"
        for number, stream in enumerate(streams):
            engine.abort(f"r{number}")
            assert [output.outputs[0].finish_reason for output in stream][-1] == "abort"
        assert not any(output.outputs[0].finish_reason == "error" for output in other)
    monkeypatch.undo()
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    found = [ask(engine, prompt) for prompt in PROMPTS]
    assert ids(found) == expected and found[0].num_cached_tokens == CACHED


def _wait_until(engine: Engine, holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds(engine.stats()):
        assert time.monotonic() < deadline, engine.stats()
        time.sleep(0.001)


def test_memory_may_shrink_and_grow_beside_it(expected: list[list[int]]):
    with Engine(small_demo(), kv="bf16", kv_memory=14 * BLOCK_NBYTES, host_memory="8MiB") as engine:
        found = list[RequestOutput]()
        thread = threading.Thread(target=lambda: found.extend(ask(engine, p) for p in PROMPTS * 3))
        thread.start()
        while thread.is_alive():
            for size in (7 * BLOCK_NBYTES, 14 * BLOCK_NBYTES):
                engine.resize(size, timeout=0.5)
        thread.join()
        assert ids(found) == expected * 3
        assert [output.num_cached_tokens for output in found[4:]] == [CACHED] * 8


def test_little_host_memory_keeps_what_it_can(expected: list[list[int]]):
    least = 2 * BLOCK_NBYTES
    with Engine(small_demo(), kv="bf16", kv_memory=7 * BLOCK_NBYTES, host_memory=least) as engine:
        for _ in range(2):
            outputs = [ask(engine, prompt) for prompt in PROMPTS]
            assert ids(outputs) == expected
        stats = engine.stats()
        assert 0 < stats.host_bytes_peak <= stats.host_bytes_total == least and stats.host_bytes_dropped > 0


def test_summary_tells_of_host_memory():
    with Engine(small_demo(), kv="auto", kv_memory="4MiB", host_memory="8MiB") as engine:
        assert engine.describe()[2] == "Host memory 8.0 MiB: 4,096 tokens of prefixes, 15,232 at the floor"
    with Engine(small_demo(), kv="auto", kv_memory="16MiB") as engine:
        assert not any("Host" in line for line in engine.describe())
        assert not any(name.startswith("host") and number for name, number in engine.stats().to_dict().items())


def test_memory_that_is_not_there_or_of_no_use_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="host_memory='1GiB': is for cached prefixes, and none are cached") as found:
        EngineConfig(kv=PRESETS["auto"], host_memory="1GiB", prefix_caching=False)
    assert "Leave host_memory or prefix_caching out" in str(found.value)
    with pytest.raises(ConfigError, match="host_memory='1GiB': is for cached prefixes, and patternkv caches none"):
        Engine(small_demo(), kv="patternkv", kv_memory="16MiB", host_memory="1GiB")
    with pytest.raises(CapacityError, match=r"host_memory='100TiB': 100.0 TiB asked for, .* free on cpu"):
        Engine(small_demo(), kv_memory="16MiB", host_memory="100TiB")
    with pytest.raises(CapacityError, match=r"host_memory=1000: no room for blocks of each rung\. Give") as small:
        Engine(small_demo(), kv_memory="16MiB", host_memory=1000)
    least = str(small.value).rsplit(" ", 2)
    with Engine(small_demo(), kv_memory="16MiB", host_memory="".join(least[1:])) as engine:
        assert engine.stats().host_bytes_total > 0


def test_kv_memory_of_a_cpu_is_not_counted_as_free(monkeypatch: pytest.MonkeyPatch):
    made = list[int]()

    def note(nbytes: int, device: object) -> FileMemory:
        made.append(nbytes)
        return FileMemory(nbytes)

    monkeypatch.setattr(startup, "free_memory", lambda device: 100 * MIB)
    monkeypatch.setattr(startup, "allocate_host", note)
    with pytest.raises(CapacityError, match="host_memory='80MiB'"):
        Engine(small_demo(), kv_memory=40 * MIB, host_memory="80MiB")
    with Engine(small_demo(), kv_memory=40 * MIB, host_memory="50%"):
        assert made == [30 * MIB]
