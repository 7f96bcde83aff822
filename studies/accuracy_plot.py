"""Accuracy against the bits of a floor: presets as points with their names, the plans of each method as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TICKS = (2, 2.5, 3, 4, 6, 8, 16)  # bits
STYLES = ("o-", "s--", "D:", "^-.")  # of the lines


class Point(NamedTuple):
    """A cache: its name, the method of a plan or None, effective bits of a block at its floor, accuracy from 0 to 1."""

    name: str
    method: str | None
    bits: float
    mean: float
    interval: tuple[float, float]


def draw_bits(points: Sequence[Point], path: Path) -> None:
    """Writes the picture of ``points`` to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for point in points:
        if point.method is None:
            axes.plot(point.bits, 100 * point.mean, "x", color="black")
            axes.annotate(
                point.name, (point.bits, 100 * point.mean), (4, 3), textcoords="offset points", fontsize="small"
            )
    methods = dict.fromkeys(point.method for point in points if point.method is not None)
    for style, method in zip(STYLES, methods, strict=False):
        line = sorted((point for point in points if point.method == method), key=lambda point: point.bits)
        bits, means = [point.bits for point in line], [100 * point.mean for point in line]
        lows, highs = ([100 * point.interval[end] for point in line] for end in (0, 1))
        axes.plot(bits, means, style, label=method)
        axes.fill_between(bits, lows, highs, color=axes.lines[-1].get_color(), alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [f"{bits:g}" for bits in TICKS])
    axes.set_xlabel("bits an element of a block on the floor, metadata counted")
    axes.set_ylabel("right answers, %, mean of the tasks")
    axes.grid(alpha=0.3)
    if methods:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
