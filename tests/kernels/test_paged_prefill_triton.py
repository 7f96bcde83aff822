"""Prefill attention kernel under Triton's interpreter, against float attention over the values pages stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")
CASES = Path(__file__).with_name("triton_prefill_cases.py")


def bound(name: str) -> float:
    if name.startswith("exact"):
        return 0.0
    return 3e-3 if name.startswith(("int", "K")) else 2e-3


def test_prefill_cases() -> None:
    """Figures of all cases at once: the interpreter's child process takes seconds to start."""
    figures = run_cases(CASES)
    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= bound(n))}
    assert figures and not wrong
