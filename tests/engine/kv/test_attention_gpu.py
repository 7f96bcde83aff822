"""A step on the GPU equals a step on the CPU; here under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreted import run_cases

also_slow = pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])


@also_slow
def test_steps_on_gpu_and_cpu_agree(slow: bool):
    figures = run_cases(Path(__file__).with_name("attention_gpu_cases.py"), slow=slow)
    assert len(figures) == 4
    assert {name: figure for name, figure in figures.items() if not (isinstance(figure, float) and figure < 3e-3)} == {}


@also_slow
def test_states_of_steps_on_gpu_and_cpu_agree(slow: bool):
    figures = run_cases(Path(__file__).with_name("state_gpu_cases.py"), slow=slow)
    assert len(figures) == (2 if slow else 3)
    bounds = {"in 16 bits": 1e-4, "in 8 bits": 1e-2}  # sums differ in their last bits, so codes may by one
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e < bounds.get(n, 1e-5))}
    assert not wrong
