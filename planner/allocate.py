"""Exact bit allocation: one choice an item, least total cost, under a budget of bytes.

A multiple-choice knapsack, solved by dynamic programming over bytes: sizes are few and share a large divisor, so the
table is small, and the optimum is exact where the integer program of PM-KVQ (arXiv 2505.18610) calls a solver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Choice(NamedTuple):
    """A way to store an item: its format, its bytes, and the cost of its errors."""

    name: str
    nbytes: int
    cost: float


def allocate(items: Sequence[Sequence[Choice]], budget: int) -> list[Choice] | None:
    """The choices, one an item, of least total cost within ``budget`` bytes; None where none fit.

    Of an item's choices of equal cost the smallest is taken.
    """
    items = [efficient(choices) for choices in items]
    least = [choices[0].nbytes for choices in items]
    room = budget - sum(least)
    if room < 0:
        return None
    extra = [[choice.nbytes - base for choice in choices] for choices, base in zip(items, least, strict=True)]
    unit = math.gcd(*(nbytes for nbytes_of in extra for nbytes in nbytes_of)) or 1
    room = min(room, sum(nbytes_of[-1] for nbytes_of in extra)) // unit
    # cost[r]: least cost of the items so far in r units above their smallest sizes; picks[i][r]: item i's choice there.
    cost, picks = torch.zeros(room + 1, dtype=torch.float64), list[torch.Tensor]()
    for choices, nbytes_of in zip(items, extra, strict=True):
        ways = torch.full((len(choices), room + 1), math.inf, dtype=torch.float64)
        for way, choice, nbytes in zip(ways, choices, nbytes_of, strict=True):
            units = nbytes // unit
            if units <= room:
                way[units:] = cost[: room + 1 - units] + choice.cost
        cost, pick = ways.min(0)
        picks.append(pick.to(torch.int16))
    found = list[Choice]()
    for choices, nbytes_of, pick in zip(items[::-1], extra[::-1], picks[::-1], strict=True):
        index = int(pick[room])
        found.append(choices[index])
        room -= nbytes_of[index] // unit
    return found[::-1]


def efficient(choices: Sequence[Choice]) -> list[Choice]:
    """The Pareto front of ``choices``: each costs less than all smaller ones. Fewest bytes first."""
    found = list[Choice]()
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.cost)):
        if not found or choice.cost < found[-1].cost:
            found.append(choice)
    return found
