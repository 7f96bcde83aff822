"""The picture of a plan: what each layer's K and V matter, their bits on every rung, and what the rungs lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qkv_engine.planner.kvmix import KVmix
from qkv_engine.planner.plan import KVPlan

from ..plan_report import LayerRow, layer_rows, plan_title, rung_rows
from .panels import COLORS
from .picture import as_file, literal, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PER_LAYER, LEAST_WIDTH, HEIGHT = 0.26, 6.4, 5.2  # inches
RUNG_HEIGHT, LOSS_HEIGHT = 0.22, 2.4  # inches of a rung's row, and of the panel of losses
MOST_TICKS = 20  # of the layers' axis, about
HEADROOM = 1.15  # of the highest bar: room for the bits above it
MOST_LABELS = 24  # layers whose cells have their bits written in
DENSE_BITS = 16
LOW, HIGH = "#BBBBBB", COLORS[0]


def plot_plan(plan: KVPlan, *, kind: str = "png", dpi: int = 150) -> bytes:
    """K's bars above V's, layer by layer, then bits by rung and predicted losses, as "png", "svg" or "pdf"."""
    rows, is_ranked = layer_rows(plan), isinstance(plan.settings, KVmix)
    width = max(LEAST_WIDTH, WIDTH_PER_LAYER * len(rows) + 1)
    inner = RUNG_HEIGHT * len(plan.ladder.rungs) + 0.5
    heights = [HEIGHT / 2, HEIGHT / 2] if is_ranked else [HEIGHT / 2, inner, HEIGHT / 2, inner, LOSS_HEIGHT]
    figure = new_figure((width, sum(heights)), dpi)
    panels = list(figure.subplots(len(heights), 1, height_ratios=heights))
    if is_ranked:
        _draw_bars(panels[0], "gradient norm of W$_K$", [row.k_score for row in rows], [row.k_bits for row in rows])
        _draw_bars(panels[1], "gradient norm of W$_V$", [row.v_score for row in rows], [row.v_bits for row in rows])
    else:
        _draw_sides(figure, panels, plan, rows)
    panels[1 if is_ranked else 3].set_xlabel("layer; above each bar its bits")
    figure.suptitle(literal(plan_title(plan)), fontsize="medium", wrap=True)
    return as_file(figure, kind)


def _draw_sides(figure: Figure, panels: Sequence[Axes], plan: KVPlan, rows: Sequence[LayerRow]) -> None:
    names = [rung.name for rung in plan.ladder.rungs]
    _draw_bars(panels[0], "K at 2 bits, nats", [row.k_nats or 0 for row in rows], [row.k_bits for row in rows])
    _draw_rungs(panels[1], "K", names, [row.k_rungs for row in rows])
    _draw_bars(panels[2], "V at 2 bits, nats", [row.v_nats or 0 for row in rows], [row.v_bits for row in rows])
    _draw_rungs(panels[3], "V", names, [row.v_rungs for row in rows])
    _draw_losses(panels[4], plan)


def _draw_bars(axes: Axes, label: str, heights: list[float], bits: list[float]) -> None:
    """One panel: the layers with more bits than the fewest in colour."""
    layers, least = range(len(heights)), min(bits)
    axes.bar(layers, heights, color=[HIGH if width > least else LOW for width in bits])
    for layer, height, width in zip(layers, heights, bits, strict=True):
        axes.annotate(f"{width:g}", (layer, height), (0, 2), textcoords="offset points", ha="center", fontsize="small")
    axes.set_ylim(0, HEADROOM * max(heights) or 1)
    axes.set_ylabel(label)
    plain_axes(axes, "y")
    _number_layers(axes, len(heights))


def _draw_rungs(axes: Axes, side: str, names: Sequence[str], bits: Sequence[Sequence[float]]) -> None:
    """A cell a rung and layer, darker for more bits."""
    by_rung = [list(rung) for rung in zip(*bits, strict=True)]
    axes.imshow(by_rung, aspect="auto", cmap="Blues", vmin=0, vmax=DENSE_BITS)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.set_ylabel(f"{side}, bits")
    if len(bits) <= MOST_LABELS:
        for number, rung in enumerate(by_rung):
            for layer, width in enumerate(rung):
                color = "white" if width > DENSE_BITS / 2 else "black"
                axes.text(layer, number, f"{width:g}", ha="center", va="center", fontsize="x-small", color=color)
    _number_layers(axes, len(bits))


def _draw_losses(axes: Axes, plan: KVPlan) -> None:
    """Predicted loss against effective bits, a point a rung; the dense one loses next to nothing."""
    points = [(rung.bits, rung.loss) for rung in rung_rows(plan)[1:] if rung.loss]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=HIGH)
        axes.set_yscale("log")
    axes.set_xlabel("bits an element, metadata counted")
    axes.set_ylabel("predicted loss, nats")
    plain_axes(axes)


def _number_layers(axes: Axes, number: int) -> None:
    axes.set_xlim(-0.7, number - 0.3)
    axes.set_xticks(range(0, number, max(1, number // MOST_TICKS)))
