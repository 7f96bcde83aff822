"""Attention kernels with windows, soft caps and null logits under Triton's interpreter, against float attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")


def test_window_cases() -> None:
    """Figures of all cases at once: the interpreter's child process takes seconds to start."""
    figures = run_cases(Path(__file__).with_name("window_cases.py"))

    def bound(name: str) -> float:
        return 0.0 if name.startswith("exact") else 1e-5 if "dense" in name else 3e-3

    wrong = {n: e for n, e in figures.items() if not (isinstance(e, float) and e <= bound(n))}
    assert figures and not wrong
