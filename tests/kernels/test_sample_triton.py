"""Sampling kernels: under the interpreter token for token the reference's, and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")


def test_sample_cases() -> None:
    figures = run_cases(Path(__file__).with_name("sample_cases.py"))
    assert len(figures) == 10
    assert not {name: figure for name, figure in figures.items() if figure != 0.0}


def test_compiled_for_hopper() -> None:
    """Nothing spills, and nothing is rounded otherwise than in the reference."""
    from studies.kernels.compiled import compile_kernel, describe, sample_kernels

    for name, kernel, constexprs, tuning in sample_kernels():
        built = compile_kernel(kernel, constexprs, tuning)
        found = describe(built)
        assert found["spilled"] == found["LDL"] == 0 and found["registers"] <= 128, (name, found)
        ptx = built.asm["ptx"]
        assert not any(inexact in ptx for inexact in ("fma.rn.f", ".ftz", "div.full", ".approx")), name
