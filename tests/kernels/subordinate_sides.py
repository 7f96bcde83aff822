"""Layers in pairs: uniform sides with codes of their own below, subordinate sides above."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from qkv_engine.kernels.formats import PageShape, Side
from qkv_engine.kernels.formats.uniform.layout import AXES, BITS, GROUPS, Uniform

STEPS = [(8, 4), (4, 2), (2, 1), (8, 1), (2, 2), (3, 3)]
ETA = Fraction(1, 6)


def pairs(bits: int, shape: PageShape, *, k_shared: bool = True, eta: Fraction = Fraction(0)) -> list[Side]:
    """K and V of two layers of every axis and group; K of the upper one subordinate if ``k_shared``, V always."""
    found: list[Side] = []
    for axis, group in product(AXES, GROUPS):
        fmt, above = Uniform(bits, axis, group, eta), Uniform(bits, axis, group, eta, True)
        found += fmt.layout(shape, "k"), fmt.layout(shape, "v")
        found += (above if k_shared else fmt).layout(shape, "k"), above.layout(shape, "v")
    return found


def all_pairs(shape: PageShape) -> list[Side]:
    """The pairs of every width."""
    return [side for bits in BITS for side in pairs(bits, shape, k_shared=bits != 4, eta=ETA)]


def pair_steps(shape: PageShape) -> list[tuple[Side, Side]]:
    """Steps of pairs whose upper layer is subordinate before the step, or only after it."""
    steps: list[tuple[Side, Side]] = []
    for wide, narrow in STEPS:
        old, new = pairs(wide, shape), pairs(narrow, shape, eta=ETA)
        steps += [*zip(old, new, strict=True), *zip([side.dominant or side for side in old], new, strict=True)]
    return steps + [(side, side) for side in pairs(2, shape)]
