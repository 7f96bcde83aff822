"""CPU threads: how many compute, and that other threads of the process keep theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from qkv_engine import ConfigError, Engine
from qkv_engine.device import threads
from qkv_engine.device.threads import (
    SMALL_MODEL_NBYTES,
    SMALL_MODEL_THREADS,
    choose_num_threads,
    computing_with,
    short_step_seconds,
)


def run(program: str, **settings: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**kept, **settings}, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("program", "settings", "expected"),
    [
        ("import qkv_engine", {}, "1000 None"),
        ("import torch, qkv_engine", {}, "None None"),
        ("import qkv_engine", {"GOMP_SPINCOUNT": "7"}, "7 None"),
        ("import qkv_engine", {"OMP_WAIT_POLICY": "active"}, "None active"),
    ],
)
def test_spinning_is_shortened_unless_somebody_has_decided(program: str, settings: dict[str, str], expected: str):
    shown = "; import os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    assert run(program + shown, **settings) == expected


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
