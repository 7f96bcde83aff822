"""CPU threads: how many compute, and that other threads of the process keep theirs."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkv_engine import ConfigError, Engine, SamplingParams, loading
from qkv_engine.device.cpu import openmp, threads
from qkv_engine.device.cpu.openmp import use_threads
from qkv_engine.device.cpu.thread_choice import FIRST_SECONDS, MOST_SECONDS, ThreadChoice
from qkv_engine.device.cpu.threads import (
    SMALL_MODEL_NBYTES,
    SMALL_MODEL_THREADS,
    choose_threads,
    computing_with,
    short_step_seconds,
)
from qkv_engine.loading import demo_folder
from qkv_engine.models.loader import num_parameters, read_config, weights_nbytes

from ..models.tiny import write_tiny


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "qkv-engine-threads"]


def wait_for(number: int) -> None:
    """Waits until so many threads of the module live."""
    deadline = time.monotonic() + 10
    while len(names()) != number:
        assert time.monotonic() < deadline, names()
        time.sleep(0.005)


def test_an_idle_team_stands_by_while_threads_wait_for_cores(monkeypatch: pytest.MonkeyPatch):
    delay, share = 0.0, 0.0

    def run_delay() -> float:
        nonlocal delay
        delay += share * 0.02
        return delay

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(openmp, "run_delay", run_delay)
    wait_for(0)
    with openmp.considerate_threads():
        wait_for(1)  # who watches
        share = 1.0
        wait_for(2)
        share = 0.0
        wait_for(1)
        share = 1.0
        wait_for(2)
    assert not names()  # a thread inside torch would abort a process that ends


def test_where_the_system_does_not_tell_a_team_stands_by(monkeypatch: pytest.MonkeyPatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(openmp, "run_delay", lambda: None)
    with openmp.considerate_threads():
        wait_for(2)
    assert not names()


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_way_of_waiting_holds(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "passive")
    wait_for(0)
    with openmp.considerate_threads():
        assert not names()


def test_waiting_for_a_core_is_counted():
    found = openmp.run_delay()
    assert found is None or found >= 0.0


def test_a_small_model_uses_a_few_threads(monkeypatch: pytest.MonkeyPatch):
    def numbers(given: int | None, nbytes: int) -> tuple[int, int | None]:
        found = choose_threads(given, nbytes)
        return found.number, found.other

    monkeypatch.setattr(threads, "short_step_seconds", lambda number: 1 / number)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert numbers(None, SMALL_MODEL_NBYTES) == (SMALL_MODEL_THREADS, 1)
    assert numbers(None, SMALL_MODEL_NBYTES + 1) == (16, None)
    assert numbers(9, 1) == (9, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert numbers(None, SMALL_MODEL_NBYTES) == (2, 1)
    monkeypatch.setattr(threads, "short_step_seconds", float)  # more threads are slower
    assert numbers(None, SMALL_MODEL_NBYTES) == (1, 2)
    assert numbers(None, SMALL_MODEL_NBYTES + 1) == (2, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert numbers(None, SMALL_MODEL_NBYTES) == (1, None)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_packed_weights_count(weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All of the model's, of which packing leaves embeddings and norms as parameters. The demo model stays small."""
    counted: list[int] = []

    def choose(given: int | None, nbytes: int, *, is_fixed: bool) -> ThreadChoice:
        counted.append(nbytes)
        return choose_threads(given, nbytes, is_fixed=is_fixed)

    monkeypatch.setattr(loading, "choose_threads", choose)
    folder = write_tiny(tmp_path / "model")
    Engine(folder, weights=weights, kv="bf16", kv_memory="1MiB", device="cpu", max_num_seqs=4).close()
    assert counted == [4 * num_parameters(read_config(folder))]
    assert weights_nbytes(read_config(demo_folder()), torch.float32) < SMALL_MODEL_NBYTES


def test_no_time_decides_where_results_must_not_differ(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "short_step_seconds", lambda number: pytest.fail("measured"))
    most = torch.get_num_threads()
    for given, nbytes, number in ((3, 1, 3), (None, 1, 1), (None, SMALL_MODEL_NBYTES + 1, most)):
        found = choose_threads(given, nbytes, is_fixed=True)
        assert found.number == number and found.other is None


class FakeEngine:
    """An engine of made-up steps. ``seconds`` tells how long one takes by its threads and requests."""

    def __init__(self, seconds: Callable[[int, int], float], number: int = 1, other: int | None = 2):
        self.now, self.threads, self.num_uses, self.seconds = 0.0, number, 0, seconds
        self.choice = ThreadChoice(number, other, use=self.use, clock=lambda: self.now)

    def use(self, number: int) -> None:
        self.threads, self.num_uses = number, self.num_uses + 1

    def step(self, num_requests: int = 1, *, has_chunk: bool = False, extra: float = 0.0) -> int:
        """Runs a step and returns the threads it had."""
        threads, taken = self.threads, self.seconds(self.threads, num_requests) + extra
        self.now += taken
        self.choice.note(None if has_chunk else num_requests, taken)
        return threads

    def run(self, seconds: float, num_requests: int = 1) -> float:
        """Runs steps for some time; the share of them that had another number of threads than chosen at the end."""
        end, found = self.now + seconds, list[int]()
        while self.now < end:
            found.append(self.step(num_requests))
        return 1 - found.count(self.choice.number) / len(found)


def test_threads_are_chosen_anew_when_the_machine_becomes_busy_or_idle():
    is_busy = True
    engine = FakeEngine(lambda threads, _: 0.004 if threads == 1 else 0.005 if is_busy else 0.003)
    assert engine.run(60) < 0.02 and engine.choice.number == 1
    is_busy = False
    engine.run(MOST_SECONDS + 1)
    assert (engine.choice.number, engine.threads, engine.choice.other) == (2, 2, 1)
    assert engine.run(60) < 0.02
    is_busy = True
    engine.run(MOST_SECONDS + 1)
    assert engine.choice.number == 1


def test_threads_follow_the_number_of_requests():
    engine = FakeEngine(lambda threads, requests: requests * 0.001 / threads + 0.002 * threads)
    engine.run(3, 1)
    assert engine.choice.number == 1
    engine.run(2 * MOST_SECONDS, 32)
    assert engine.choice.number == 2


def test_near_times_and_single_slow_steps_change_nothing():
    engine = FakeEngine(lambda threads, _: 0.004 if threads == 1 else 0.0038)
    engine.run(60)
    assert engine.choice.number == 1
    noisy, rng = FakeEngine(lambda threads, _: 0.004 if threads == 1 else 0.005), random.Random(0)
    for _ in range(20_000):
        noisy.step(extra=0.1 if rng.random() < 0.15 else 0.0)
        assert noisy.choice.number == 1


def test_a_trial_compares_steps_of_equally_many_requests_that_only_decode():
    engine = FakeEngine(lambda threads, _: 0.003)
    engine.run(FIRST_SECONDS + 0.03)  # the first turn has ended
    assert engine.threads == 2
    engine.step(2)
    assert engine.threads == 1, "the trial is over"
    engine.run(FIRST_SECONDS + 0.03)
    assert engine.threads == 2
    engine.step(has_chunk=True)
    assert engine.threads == 1
    for number in range(2_000):
        assert engine.step(number % 5 + 1) == 1


def test_a_number_that_was_asked_for_stays():
    engine = FakeEngine(lambda threads, _: 0.1 * threads, number=4, other=None)
    engine.run(100)
    assert engine.num_uses == 0 and engine.choice.number == 4


def test_an_engine_tells_its_steps_to_the_choice(small_engine: Engine, monkeypatch: pytest.MonkeyPatch):
    found: list[tuple[int | None, float]] = []
    small_engine.stats()  # the steps of other tests have been told
    monkeypatch.setattr(small_engine._loop._threads, "note", lambda *step: found.append(step))
    small_engine.generate([[5, 6, 7], [6, 7, 8]], SamplingParams(max_tokens=4, ignore_eos=True))
    small_engine.stats()  # the loop answers between steps, so after it has told the last one
    assert [requests for requests, _ in found] in ([None, 2, 2, 2], [None, None, 1, 2, 2, 1])
    assert all(seconds > 0 for _, seconds in found)


def test_a_short_step_is_measured_once():
    assert 0 < short_step_seconds(1) < 1
    assert short_step_seconds(1) == short_step_seconds(1)


def test_an_interrupt_waits_until_the_measurement_has_left_torch(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    linear = torch.nn.functional.linear

    def slow(*args: torch.Tensor) -> torch.Tensor:
        if not events:
            events.append("begins")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)
            events.append("ends")
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", slow)
    short_step_seconds.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        short_step_seconds(1)
    assert events == ["begins", "ends"]


def test_other_threads_keep_their_number():
    found: dict[str, int] = {}

    def compute() -> None:
        with computing_with(3):
            for number in (1, 2, 3):  # chosen anew
                use_threads(number)
            torch.ones(2**20).add_(1)
            found["inside"] = torch.get_num_threads()

    before = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    other = threading.Thread(target=lambda: found.update(other=torch.get_num_threads()))
    other.start()
    other.join()
    assert found == {"inside": 3, "other": before} and torch.get_num_threads() == before


def test_threads_come_and_go_with_the_engine():
    with Engine(kv_memory="8MiB", num_threads=2) as engine:
        assert engine.stats().num_threads == engine._loop.call(torch.get_num_threads) == 2
    for thread in threading.enumerate():
        if thread.name.startswith("qkv-engine-threads"):
            thread.join(10)
            assert not thread.is_alive()
    with pytest.raises(ConfigError, match="num_threads=0"):
        Engine(num_threads=0)
