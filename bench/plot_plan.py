"""The picture of a plan: each layer's scores, with the bits that they led to."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from qkv_engine.calibrate.plan import KVPlan

from .plan_report import layer_rows, plan_title
from .plot_panels import COLORS
from .plots import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PER_LAYER, LEAST_WIDTH, HEIGHT = 0.26, 6.4, 5.2  # inches
MOST_TICKS = 20  # of the layers' axis, about
HEADROOM = 1.15  # of the highest bar: room for the bits above it
LOW, HIGH = "#BBBBBB", COLORS[0]


def plot_plan(plan: KVPlan, *, kind: str = "png", dpi: int = 150) -> bytes:
    """Bars of K's scores above those of V's, layer by layer, as "png", "svg" or "pdf"."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = layer_rows(plan)
    size = (max(LEAST_WIDTH, WIDTH_PER_LAYER * len(rows) + 1), HEIGHT)
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    keys, values = figure.subplots(2, 1, sharex=True)
    _draw(keys, "K", [row.k_score for row in rows], [row.k_bits for row in rows])
    _draw(values, "V", [row.v_score for row in rows], [row.v_bits for row in rows])
    values.set_xlabel("layer; above each bar its bits")
    figure.suptitle(plan_title(plan).replace("$", r"\$"), fontsize="medium", wrap=True)
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    return picture.getvalue()


def _draw(axes: Axes, side: str, scores: list[float], bits: list[float]) -> None:
    """One panel: the layers with more bits than the fewest in colour."""
    layers, least = range(len(scores)), min(bits)
    axes.bar(layers, scores, color=[HIGH if width > least else LOW for width in bits])
    for layer, score, width in zip(layers, scores, bits, strict=True):
        axes.annotate(f"{width:g}", (layer, score), (0, 2), textcoords="offset points", ha="center", fontsize="small")
    axes.set_ylim(0, HEADROOM * max(scores) or 1)
    axes.set_xlim(-0.7, len(scores) - 0.3)
    axes.set_ylabel(f"gradient norm of W$_{side}$")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(range(0, len(scores), max(1, len(scores) // MOST_TICKS)))
