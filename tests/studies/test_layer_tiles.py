"""Coordinate descent over launch parameters, with times that are made up."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from studies.kernels.layer_tiles import Choice, descend


def test_each_product_keeps_what_makes_the_whole_shortest() -> None:
    def measure(choice: Choice) -> float | None:
        a, b = choice["a"], choice["b"]
        if a == 3:
            return None  # fails
        return {None: 10.0, 1: 8.0, 2: 9.0}[a] + {None: 5.0, 1: 6.0, 2: 4.0, 3: 4.5}[b] - 4 * (a == b == 2)

    steps = list(descend({"a": None, "b": None}, (1, 2, 3), measure, rounds=2))
    assert [(name, us) for name, _, us in steps] == [("a", 13.0), ("b", 12.0), ("a", 9.0), ("b", 9.0)]
    assert steps[0][1] == {"a": 1, "b": None} and steps[-1][1] == {"a": 2, "b": 2}


def test_a_first_launch_that_fails_is_replaced() -> None:
    found = list(descend({"a": None}, (1,), lambda choice: choice["a"] and 7.0, rounds=1))
    assert found == [("a", {"a": 1}, 7.0)]
