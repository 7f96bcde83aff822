"""RMSNorm, SwiGLU, and rotation with KV write: Triton kernels under the interpreter against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")


def bound(name: str) -> float:
    """Roundings of the dtype: one, or in float32, where every operation rounds, a few."""
    if "extremes" in name:
        return 0.0
    return 6.0 if "fp32" in name else 1.0


def test_fused_cases() -> None:
    figures = run_cases(Path(__file__).with_name("fused_cases.py"))
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= bound(n))}
    assert len(figures) == 90 and not wrong
