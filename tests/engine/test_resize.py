"""``Engine.resize`` beside running requests: all finish, pinned ones unchanged, and the process's memory follows."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from qkv_engine import CapacityError, ConfigError, Engine, EngineDeadError, RequestOutput, SamplingParams
from qkv_engine.device.resizable import FixedMemory

from ..small_demo import small_demo

MIB = 2**20
LARGE, SMALL = 256 * MIB, 16 * MIB
PROMPTS = [f"{number}: " + " ".join(str(number * i) for i in range(60)) for number in range(20)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(small_demo(), kv_memory=LARGE, num_threads=1) as engine:
        yield engine


def params(number_tokens: int) -> list[SamplingParams]:
    """Greedy ones of so many tokens, a quarter of them pinned."""
    pinned = [number % 4 == 0 for number in range(len(PROMPTS))]
    return [SamplingParams(temperature=0, max_tokens=number_tokens, ignore_eos=True, kv_pinned=each) for each in pinned]


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def touch_all(engine: Engine) -> None:
    """Has all pages of KV memory resident, whatever blocks lie there."""
    memory = engine._alive.core.runner.cache.memory  # type: ignore[union-attr]
    engine._loop.call(lambda: memory[:: mmap.PAGESIZE].add_(0))


def shrink_and_grow(engine: Engine, times: int, num_tokens: int) -> tuple[list[RequestOutput], int]:
    """The outputs of requests beside changes of size, and the changes there were while they ran."""
    found, number = list[RequestOutput](), 0
    thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, params(num_tokens))))
    engine.generate(PROMPTS, SamplingParams(max_tokens=1))  # has what a whole batch takes allocated
    touch_all(engine)
    others = resident_nbytes() - LARGE
    thread.start()
    while engine.stats().num_running < len(PROMPTS) and thread.is_alive():
        time.sleep(0.001)
    while thread.is_alive() and number < times:
        assert engine.resize(SMALL) <= SMALL
        assert abs(resident_nbytes() - others - SMALL) < 0.1 * (others + SMALL)
        held = engine.stats().kv_bytes_total
        assert 0.97 * SMALL < held <= SMALL
        assert engine.resize(LARGE) == LARGE
        touch_all(engine)
        assert abs(resident_nbytes() - others - LARGE) < 0.1 * (others + LARGE)
        number += thread.is_alive()
    thread.join()
    engine.resize(LARGE)
    return found, number


def pinned_alone(engine: Engine, num_tokens: int) -> list[RequestOutput]:
    """The outputs of the pinned requests without the others."""
    return engine.generate(PROMPTS[::4], params(num_tokens)[::4])


def check_outputs(outputs: list[RequestOutput], alone: list[RequestOutput], num_tokens: int) -> None:
    assert [len(output.token_ids) for output in outputs] == [num_tokens] * len(PROMPTS)
    for output, expected in zip(outputs[::4], alone, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.kv.lowest_bits == 16 or output.kv.lowest_bits == 32


def test_memory_follows_beside_twenty_requests(engine: Engine):
    alone = pinned_alone(engine, 160)
    outputs, number = shrink_and_grow(engine, 3, 160)
    assert number >= 2
    check_outputs(outputs, alone, 160)
    assert engine.stats().num_preemptions == 0


@pytest.mark.slow
def test_two_hundred_times(engine: Engine):
    alone, number = pinned_alone(engine, 300), 0
    while number < 200:
        outputs, more = shrink_and_grow(engine, 200 - number, 300)
        check_outputs(outputs, alone, 300)
        number += more
    assert engine.stats().num_preemptions == 0


def test_an_idle_engine_shrinks_to_the_least_and_serves(engine: Engine):
    whole = engine.generate("What is 6*7?", SamplingParams(temperature=0, max_tokens=8))
    with pytest.raises(CapacityError, match="could reach") as refused:
        engine.resize("256KiB")
    assert "at least" in str(refused.value) and engine.stats().kv_bytes_total == LARGE
    least = engine.resize("2MiB")
    assert 1.9 * MIB < least <= 2 * MIB and engine.stats().kv_bytes_total == least
    assert engine.stats().kv_tokens_floor < 2 * MIB // 500
    assert engine.generate("What is 6*7?", SamplingParams(temperature=0, max_tokens=8))[0].text == whole[0].text
    with pytest.raises(CapacityError, match="KV memory"):
        engine.generate([5] * 6000, SamplingParams(max_tokens=100))
    assert engine.resize("50%") == LARGE // 2 and engine.resize(1.0) == LARGE


def test_more_than_at_the_start_and_no_size_are_refused(engine: Engine):
    with pytest.raises(CapacityError, match="at the start"):
        engine.resize(LARGE + 1)
    for size in ("some", 0, -1, 2.0, True, None):
        with pytest.raises(ConfigError, match="size"):
            engine.resize(size)  # type: ignore[arg-type]
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="timeout"):
            engine.resize(LARGE, timeout=timeout)
    assert engine.stats().kv_bytes_total == LARGE


def test_without_time_a_shrink_goes_on(engine: Engine):
    with engine.stream(PROMPTS[0] * 4, SamplingParams(max_tokens=500, ignore_eos=True)) as stream:
        next(stream)
        engine.resize(SMALL, timeout=0)
        for _ in range(200):
            next(stream)
        assert engine.stats().kv_bytes_total <= SMALL
    assert engine.resize(LARGE) == LARGE


def test_a_waiting_request_is_not_shut_out(engine: Engine):
    with engine.stream([7] * 3000, SamplingParams(max_tokens=200, ignore_eos=True)) as stream:
        next(stream)
        with pytest.raises(CapacityError, match="could reach"):
            engine.resize("1MiB")


def test_a_closed_engine_is_not_resized():
    engine = Engine(small_demo(), kv_memory="8MiB")
    engine.close()
    with pytest.raises(EngineDeadError):
        engine.resize("1MiB")


def test_memory_that_the_system_does_not_give_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch):
    def no_pages(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_pages)
        with pytest.raises(CapacityError, match=r"kv_memory='8.0 MiB': the system does not give so much memory on cpu"):
            Engine(small_demo(), kv_memory=8 * MIB)


def test_growth_that_the_device_refuses_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    def refuse(hole: tuple[int, int]) -> None:
        raise CapacityError("no memory left", remedy="Wait")

    small = engine.resize(SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(engine._alive.core.runner, "dig", refuse)  # type: ignore[union-attr]
        with pytest.raises(CapacityError, match="no memory left"):
            engine.resize(LARGE)
    assert engine.stats().kv_bytes_total == small
    assert engine.generate("Hi", SamplingParams(max_tokens=4))[0].finished and engine.resize(LARGE) == LARGE


def test_memory_of_fixed_size_is_not_resized(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    cache = engine._alive.core.runner.cache  # type: ignore[union-attr]
    monkeypatch.setattr(cache, "backing", FixedMemory(16, torch.device("cpu")))
    with pytest.raises(ConfigError, match=r"fixed.*resizable=True"):
        engine.resize(SMALL)


def test_a_call_that_waits_ends_with_the_engine():
    """Nobody notes that the shrink has ended."""
    engine = Engine(small_demo(), kv_memory=LARGE, num_threads=1)
    errors = list[BaseException]()
    thread = threading.Thread(target=lambda: errors.append(_error_of(lambda: engine.resize(SMALL))))
    monitor = engine._alive.core.resizer  # type: ignore[union-attr]
    monitor.note = lambda space: None  # type: ignore[method-assign]
    thread.start()
    while not monitor.is_pending:
        time.sleep(0.001)
    engine.close()
    thread.join(10)
    assert not thread.is_alive() and isinstance(errors[0], EngineDeadError)


def _error_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def test_all_ranks_shrink_and_grow():
    prompts, given = PROMPTS[:4], params(60)[:4]
    with Engine(small_demo(), kv_memory=8 * MIB, tensor_parallel=2, num_threads=1) as engine:
        alone, found = engine.generate(prompts, given), list[RequestOutput]()
        thread = threading.Thread(target=lambda: found.extend(engine.generate(prompts, given)))
        thread.start()
        while thread.is_alive():
            assert engine.resize(3 * MIB) <= 3 * MIB
            assert engine.resize(8 * MIB) == 8 * MIB
        thread.join()
    assert found[0].token_ids == alone[0].token_ids and [len(each.token_ids) for each in found] == [60] * 4
