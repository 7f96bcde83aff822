"""Plot of accuracy against bits at the floor: presets as points with names, the plans of each method as a line."""

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


def draw_bits(points: Sequence[Point], path: Path) -> None:
    """Writes the picture of ``points`` to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for (bits, mean), names in _places(points).items():
        axes.plot(bits, mean, "x", color="black")
        axes.annotate(", ".join(names), (bits, mean), (4, -12), textcoords="offset points", fontsize="small")
    methods = dict.fromkeys(point.method for point in points if point.method is not None)
    for style, method in zip(STYLES, methods, strict=False):
        line = sorted((point for point in points if point.method == method), key=lambda point: point.bits)
        axes.plot([point.bits for point in line], [100 * point.mean for point in line], style, label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [f"{bits:g}" for bits in TICKS])
    axes.set_xlabel("bits an element of a block on the floor, metadata counted")
    axes.set_ylabel("right answers, %, mean of the tasks")
    axes.grid(alpha=0.3)
    if methods:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _places(points: Sequence[Point]) -> dict[tuple[float, float], list[str]]:
    """The presets' names by point: presets of the same bits and percentage share one."""
    found: dict[tuple[float, float], list[str]] = {}
    for point in points:
        if point.method is None:
            found.setdefault((round(point.bits, 1), round(100 * point.mean)), []).append(point.name)
    return found
