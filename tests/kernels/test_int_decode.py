"""The integer decode kernel against float64 attention, for every width, axis and group (interpreter)."""

from __future__ import annotations

import pytest

from qkv_engine.kernels.formats.family import PageShape
from qkv_engine.kernels.formats.uniform.integer import integer_functions
from qkv_engine.kernels.formats.uniform.layout import Axis, SideName, Uniform

from .interpreted import run_cases

LIMIT = 2e-3  # relative; queries and weights are 16-bit fixed point


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    from . import int_decode_cases

    return run_cases(int_decode_cases.__file__)


def test_equals_float_attention(figures: dict[str, float]) -> None:
    wrong = {name: figure for name, figure in figures.items() if not isinstance(figure, float) or figure > LIMIT}
    assert len(figures) > 80 and not wrong


@pytest.mark.parametrize(
    ("side", "axis", "group", "is_integer"),
    [
        ("k", "channel", 32, True),
        ("k", "token", 128, True),
        ("k", "token", 64, False),
        ("v", "token", 32, True),
        ("v", "channel", 128, False),
    ],
)
def test_sides_that_integer_dots_serve(side: SideName, axis: Axis, group: int, is_integer: bool) -> None:
    layout = Uniform(4, axis, group).layout(PageShape(2, 128, 128), side)
    assert (integer_functions(layout) is not None) == is_integer
