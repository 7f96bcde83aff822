"""Uniform sides whose levels are drawn in, and the steps that lead to them."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from qkv_engine.kernels.formats import PageShape, Side
from qkv_engine.kernels.formats.uniform.layout import AXES, BITS, GROUPS, Uniform

from .format_pages import format_sides

ETAS = {8: Fraction(1, 8), 4: Fraction(1, 16), 3: Fraction(1, 20), 2: Fraction("0.045"), 1: Fraction(1, 6)}
STEPS = [(8, 8), (8, 4), (4, 2), (2, 2), (8, 1), (2, 1), (1, 1), (3, 3)]


def calibrated_sides(shape: PageShape) -> list[Side]:
    """K and V of every width, axis and group."""
    formats = (Uniform(bits, axis, group, ETAS[bits]) for bits, axis, group in product(BITS, AXES, GROUPS))
    return [side for fmt in formats for side in format_sides(fmt, shape)]


def calibrated_steps(shape: PageShape) -> list[tuple[Side, Side]]:
    """Plain sides to calibrated ones, and back where the width stays."""
    steps = []
    for (wide, narrow), axis, group in product(STEPS, AXES, GROUPS):
        ends = Uniform(wide, axis, group), Uniform(narrow, axis, group, ETAS[narrow])
        for old, new in (ends, ends[::-1])[: 2 if wide == narrow else 1]:
            steps += zip(format_sides(old, shape), format_sides(new, shape), strict=True)
    return steps
