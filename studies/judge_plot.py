"""Plot of divergence against bits of a block and bits held: presets as points with names, methods as lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qkv_engine.bench.divergence import kl_of
from qkv_engine.bench.judged import JudgedRow
from qkv_engine.bench.plots.picture import new_figure

from .judge_texts import OTHER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("o-", "s--", "^-.", "D:")  # of the methods
TICKS = (2, 2.5, 3, 4, 6, 8, 12, 16)  # bits


def draw(rows: Sequence[JudgedRow], path: Path) -> None:
    """Writes the picture of ``rows`` to ``path``, a .png. Raises ``ConfigError`` without matplotlib."""
    figure = new_figure((12, 5), 130)
    left, right = figure.subplots(1, 2, sharey=True)
    measured = [row for row in rows if row.sets() and row.kv != row.reference]
    _panel(left, measured, lambda row: row.block_bits or 0.0, "bits of a block on the floor")
    _panel(right, measured, lambda row: row.held_bits or 0.0, "bits held with windows at 16 bits")
    left.set_ylabel(f"KL divergence from {rows[0].reference}, nats a token")
    if any(row.method for row in measured):
        left.legend(frameon=False)
    figure.savefig(path)


def _panel(axes: Axes, rows: Sequence[JudgedRow], bits: Callable[[JudgedRow], float], label: str) -> None:
    for row in (row for row in rows if row.method is None):
        axes.plot(bits(row), _kl(row), "x", color="black")
        axes.annotate(row.kv, (bits(row), _kl(row)), (4, 4), textcoords="offset points", fontsize="small")
    kinds = dict.fromkeys((row.method, row.profile) for row in rows if row.method is not None)
    methods = list(dict.fromkeys(method for method, _ in kinds))
    for method, profile in kinds:
        line = sorted((bits(row), _kl(row)) for row in rows if (row.method, row.profile) == (method, profile))
        face = "white" if profile == OTHER else None
        name = f"{method}, {profile}" if profile == OTHER else method
        style, color = STYLES[methods.index(method) % len(STYLES)], f"C{methods.index(method)}"
        axes.plot(*zip(*line, strict=True), style, color=color, markerfacecolor=face, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xlabel(f"{label}, metadata counted")
    axes.grid(alpha=0.3)


def _kl(row: JudgedRow) -> float:
    """The mean divergence of a row; a trillionth where there is none, for the logarithm."""
    return max(1e-12, kl_of(*row.sets().values()).mean)
