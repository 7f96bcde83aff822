"""Triton kernels of page formats under the interpreter: bytes equal to the references', values within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from .interpreted import run_cases

pytest.importorskip("triton")


def test_triton_kernels_equal_their_references() -> None:
    figures = run_cases(str(Path(__file__).with_name("format_cases.py")))
    assert len(figures) == 20
    wrong = {
        case: figure
        for case, figure in figures.items()
        if isinstance(figure, str) or figure > (1e-5 if case.startswith("dequant") else 0)
    }
    assert not wrong
