"""Graded sides with 96 channels a head for Triton's interpreter: what ``graded_cases`` has of the other sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .format_cases import demote_case, seal_case, tile_case
from .graded_cases import BF16, attention, graded_sides, layouts, steps
from .interpreted import report

HEAD_DIM = 96


def cases() -> dict[str, Callable[[], float]]:
    sides, names = graded_sides(HEAD_DIM), layouts(HEAD_DIM)
    found: dict[str, Callable[[], float]] = {
        "seal": partial(seal_case, sides, BF16),
        "tile": partial(tile_case, sides),
        "demote": partial(demote_case, steps(sides)),
    }
    for k, v in zip(names, names[1:] + names[:1], strict=True):
        found[f"decode K {k} V {v}"] = attention(k, v, HEAD_DIM, 2, heads=1)
    return found


if __name__ == "__main__":
    report(cases())
