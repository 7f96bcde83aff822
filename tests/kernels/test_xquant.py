"""XQuant's rungs in Triton: without calibration and sharing they are KIVI, bit for bit."""

from __future__ import annotations

import pytest

from .interpreted import run_cases


def test_triton_seals_are_kivis_and_the_references() -> None:
    pytest.importorskip("triton")
    from . import xquant_cases

    figures = run_cases(xquant_cases.__file__)
    assert len(figures) == 6 and set(figures.values()) == {0}
