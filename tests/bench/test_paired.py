"""Paired tests against published values, and the words of a cell."""

import pytest

from qkv_engine.bench.paired import Paired, paired_cell, sign_test


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 5, 1.0), (0, 6, 0.03125), (9, 1, 0.021484), (24, 2, 1.049e-5), (17, 1, 1.45e-4)],
)
def test_the_sign_test_is_exact(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == sign_test(worse, better) == pytest.approx(p, rel=1e-3)


def test_questions_on_which_both_are_level_count_for_neither() -> None:
    assert Paired.of([True, True, False, True], [True, False, True, False]) == (2, 1, 1.0)
    assert Paired.of([-0.1, -0.2, -0.3], [-0.1, -0.3, -0.4])[:2] == (2, 0)
    with pytest.raises(ValueError, match="zip"):
        Paired.of([True], [True, False])


@pytest.mark.parametrize(
    ("cell", "paired"),
    [
        ("", (None, None, None)),
        ("=", (0, 0, 1.0)),
        ("3 : 3, 1", (3, 3, 1.0)),
        ("9 : 1, .021", (9, 1, 0.0215)),
        ("24 : 2, <.001", (24, 2, 1e-5)),
    ],
)
def test_cells(cell: str, paired: tuple[int | None, int | None, float | None]) -> None:
    assert paired_cell(*paired) == cell
