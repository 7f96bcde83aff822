"""Ctrl-C at any moment of any call leaves no lock, no request, no thread and no other caller's answer behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interrupted_calls.py")


def attack(number: int, seed: int, seconds: float) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(number), str(seed)], capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_interrupts_leave_nothing_behind():
    assert sum(attack(100, 1, 300).values()) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_twenty_thousand_interrupts_leave_nothing_behind(seed: int, report: list[str]):
    counts = attack(5_000, seed, 1800)
    report.append(f"interrupted calls, seed {seed}: {counts}")
    assert sum(counts.values()) >= 5_000
