"""A step on the GPU equals a step on the CPU; here under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.interpreted import run_cases


def test_steps_on_gpu_and_cpu_agree():
    figures = run_cases(Path(__file__).with_name("attention_gpu_cases.py"))
    assert len(figures) == 7
    assert {name: figure for name, figure in figures.items() if not (isinstance(figure, float) and figure < 3e-3)} == {}


def test_states_of_steps_on_gpu_and_cpu_agree():
    figures = run_cases(Path(__file__).with_name("state_gpu_cases.py"))
    assert len(figures) == 3
    assert {name: figure for name, figure in figures.items() if not (isinstance(figure, float) and figure < 1e-5)} == {}
