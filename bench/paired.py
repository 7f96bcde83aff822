"""Comparison of two rows that answered the same questions: which of them is better on more, and whether chance does so.

A paired test separates rows whose intervals overlap, since how hard a question is counts for both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

ABOVE = "vs row above, p"  # header of a column of comparisons


class Paired(NamedTuple):
    """Questions on which a row is better and worse than another one; those on which they are level count for neither.

    ``p``: the probability of a split at least as uneven if either were as likely, the exact two-sided sign test. For
    right and wrong answers this is McNemar's exact test.
    """

    better: int
    worse: int
    p: float

    @classmethod
    def of(cls, mine: Sequence[float], other: Sequence[float]) -> Paired:
        """``mine`` against ``other``, a score for each question in the same order; a higher one is better."""
        better = sum(a > b for a, b in zip(mine, other, strict=True))
        worse = sum(a < b for a, b in zip(mine, other, strict=True))
        return cls(better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """The two-sided probability of a split as uneven as better : worse or more so, if both were as likely."""
    number = better + worse
    tail = sum(comb(number, i) for i in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**number))


def paired_cell(better: int | None, worse: int | None, p: float | None) -> str:
    """A comparison as a cell: better : worse and p, such as "12 : 3, .04"; "=" where no question differs."""
    if better is None or worse is None or p is None:
        return ""
    if not better + worse:
        return "="
    shown = "<.001" if p < 0.001 else f"{p:.2g}".removeprefix("0") if p < 1 else "1"
    return f"{better} : {worse}, {shown}"
