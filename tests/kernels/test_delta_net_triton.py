"""Gated delta-net: Triton kernels under the interpreter against plain torch, states in a byte arena of NaN."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")


def bound(name: str) -> float:
    """Relative errors; of chunks in bfloat16 the products round their right sides."""
    return 1e-2 if "chunks" in name and "bf16" in name else 1e-5


def test_delta_net_cases() -> None:
    figures = run_cases(Path(__file__).with_name("delta_net_cases.py"))
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= bound(n))}
    assert len(figures) == 72 and not wrong
