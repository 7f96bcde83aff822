"""Bit allocation against brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from qkv_engine.planner.allocate import Choice, allocate, efficient


def brute_force(items: list[list[Choice]], budget: int) -> float | None:
    """The least cost over all combinations that fit."""
    fitting = [c for c in itertools.product(*items) if sum(choice.nbytes for choice in c) <= budget]
    return min((sum(choice.cost for choice in c) for c in fitting), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_it_equals_brute_force(seed: int):
    rng = random.Random(seed)
    step = rng.choice([1, 7, 128])
    items = [
        [
            Choice(str(i), step * rng.randrange(1, 30), rng.choice([rng.random(), 1.0]))
            for i in range(rng.randrange(1, 6))
        ]
        for _ in range(rng.randrange(1, 6))
    ]
    least = sum(min(choice.nbytes for choice in choices) for choices in items)
    most = sum(max(choice.nbytes for choice in choices) for choices in items)
    for budget in (least - 1, least, rng.randrange(least, most + 1), most, 10 * most):
        found, expected = allocate(items, budget), brute_force(items, budget)
        if expected is None:
            assert found is None
            continue
        assert found is not None and sum(choice.nbytes for choice in found) <= budget
        assert sum(choice.cost for choice in found) == pytest.approx(expected, rel=1e-12)
        assert all(choice in choices for choice, choices in zip(found, items, strict=True))


def test_of_equal_costs_the_smaller_is_taken():
    assert allocate([[Choice("large", 9, 1.0), Choice("small", 3, 1.0)]], 100) == [Choice("small", 3, 1.0)]


def test_choices_that_gain_nothing_are_left_out():
    choices = [Choice("a", 5, 3.0), Choice("b", 5, 2.0), Choice("c", 7, 2.0), Choice("d", 9, 1.0), Choice("e", 3, 4.0)]
    assert [choice.name for choice in efficient(choices)] == ["e", "b", "d"]
