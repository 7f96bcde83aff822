"""Block tables on the device, and the decode plan made from them; under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from .interpreted import run_cases


def test_equal_to_the_references():
    figures = run_cases(Path(__file__).with_name("block_tables_cases.py"))
    assert len(figures) == 19
    assert {name: figure for name, figure in figures.items() if figure != 0.0} == {}
