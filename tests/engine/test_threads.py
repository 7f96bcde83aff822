"""CPU threads: how many compute, and that other threads of the process keep theirs."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from qkv_engine import ConfigError, Engine
from qkv_engine.device import openmp, threads
from qkv_engine.device.threads import (
    SMALL_MODEL_NBYTES,
    SMALL_MODEL_THREADS,
    choose_num_threads,
    computing_with,
    short_step_seconds,
)


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
    wait_for(0)


def test_where_the_system_does_not_tell_a_team_stands_by(monkeypatch: pytest.MonkeyPatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(openmp, "run_delay", lambda: None)
    with openmp.considerate_threads():
        wait_for(2)
    wait_for(0)


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
    monkeypatch.setattr(threads, "short_step_seconds", lambda number: 1 / number)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert choose_num_threads(None, SMALL_MODEL_NBYTES) == SMALL_MODEL_THREADS
    assert choose_num_threads(None, SMALL_MODEL_NBYTES + 1) == 16
    assert choose_num_threads(9, 1) == 9
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert choose_num_threads(None, SMALL_MODEL_NBYTES) == 2
    monkeypatch.setattr(threads, "short_step_seconds", float)  # more threads are slower
    assert choose_num_threads(None, SMALL_MODEL_NBYTES) == 1
    assert choose_num_threads(None, SMALL_MODEL_NBYTES + 1) == 2


def test_a_short_step_is_measured_once():
    assert 0 < short_step_seconds(1) < 1
    assert short_step_seconds(1) == short_step_seconds(1)


def test_other_threads_keep_their_number():
    found: dict[str, int] = {}

    def compute() -> None:
        with computing_with(3):
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
