"""Runs with arrivals as a picture over time, a column a preset: blocks by rung, free KV memory, requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from qkv_engine.sizes import format_size

from ..arrivals_row import ArrivalsRow
from .picture import as_file, literal, new_figure, plain_axes, subject, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..arrivals import Measured

COLUMN_WIDTH, LEAST_WIDTH, HEIGHT = 3.2, 6.6, 6.8  # inches
HEIGHTS = (3.0, 1.2, 1.6)  # of the panels, relative
HEADROOM = 1.06  # of the highest value
# From many bits to few, evenly over the logarithm of the bits: cold to hot.
PRECISION_COLORS = ("#1B3A5C", "#2F7EBC", "#8CC7C1", "#F2C14E", "#E4632D", "#9C1C28")
MOST_BITS, FEWEST_BITS = 16.0, 2.0
RUNNING, WAITING, FREE, GREY = "#1B3A5C", "#D55E00", "#5B7F95", "#666666"
LEGEND_COLUMNS = 8
TRACE = "trace"  # the rate without a number


def plot_arrivals(found: Sequence[Measured], bits: Mapping[str, float], *, kind: str = "png", dpi: int = 150) -> bytes:
    """The picture of the runs at the highest rate, as "png", "svg" or "pdf"; ``bits`` of a KV element by rung."""
    shown = _at_highest_rate(found)
    width = max(LEAST_WIDTH, COLUMN_WIDTH * len(shown) + 1)
    figure = new_figure((width, HEIGHT), dpi)
    grid = figure.subplots(3, len(shown), squeeze=False, sharex=True, sharey="row", height_ratios=HEIGHTS)
    rungs = _colors(shown, bits)
    unit, divisor = unit_of(max(one.row.kv_bytes_total or 0 for one in shown))
    for one, (blocks, memory, requests) in zip(shown, grid.T, strict=True):
        _draw_blocks(blocks, one, rungs)
        _draw_free(memory, one, divisor)
        _draw_requests(requests, one)
    for axes, label in zip(grid[:, 0], ("blocks of 128 tokens", f"free KV, {unit}", "requests"), strict=True):
        axes.set_ylabel(label)
    for axes in grid.flat:
        _dress(axes)
    figure.align_ylabels(grid[:, 0])
    figure.suptitle(_title(next((one.row for one in shown if one.series), shown[0].row)), fontweight="bold")
    has_reserve = any(one.row.kv_bytes_reserve for one in shown)
    _legend(figure, rungs, has_preemptions=any(one.row.preemptions for one in shown), has_reserve=has_reserve)
    return as_file(figure, kind)


def _at_highest_rate(found: Sequence[Measured]) -> list[Measured]:
    """One run a preset, all at the highest rate there is; the times of a trace have none."""
    rates = {one.row.rate: 0.0 if one.row.rate == TRACE else float(one.row.rate) for one in found}
    highest = max(rates, key=lambda rate: rates[rate])
    return [one for one in found if one.row.rate == highest]


def _colors(shown: Sequence[Measured], bits: Mapping[str, float]) -> dict[str, Any]:
    """The colour of each rung that any block stood on, most bits first."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("precision", PRECISION_COLORS)
    names = {name for one in shown for sample in one.series for name in sample.blocks}
    span = math.log2(MOST_BITS / FEWEST_BITS)
    ordered = sorted(names, key=lambda name: -bits[name])
    return {name: colors(math.log2(MOST_BITS / bits[name]) / span) for name in ordered}


def _draw_blocks(axes: Axes, one: Measured, rungs: Mapping[str, Any]) -> None:
    axes.set_title(literal(one.row.kv), fontweight="bold", pad=18)
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    axes.annotate(_counts(one.row), (0.5, 1), (0, 5), fontsize="small", color=GREY, **style)
    layers = [[sample.blocks.get(name, 0) for sample in one.series] for name in rungs]
    if one.series and layers:
        seconds = [sample.seconds for sample in one.series]
        axes.stackplot(seconds, layers, colors=list(rungs.values()), linewidth=0, step="post")
    else:
        axes.annotate(one.row.status, (0.5, 0.5), (0, 0), color=GREY, **style)


def _draw_free(axes: Axes, one: Measured, divisor: int) -> None:
    seconds = [sample.seconds for sample in one.series]
    free = [sample.kv_bytes_free / divisor for sample in one.series]
    axes.fill_between(seconds, free, step="post", color=FREE, alpha=0.3, linewidth=0)
    axes.step(seconds, free, where="post", color=FREE, linewidth=1.2)
    if one.row.kv_bytes_reserve:
        axes.axhline(one.row.kv_bytes_reserve / divisor, color=GREY, linewidth=0.8, linestyle=":")


def _draw_requests(axes: Axes, one: Measured) -> None:
    """Running and waiting requests, and below them a mark where some were preempted."""
    seconds = [sample.seconds for sample in one.series]
    for values, color in (
        ([sample.running for sample in one.series], RUNNING),
        ([sample.waiting for sample in one.series], WAITING),
    ):
        axes.fill_between(seconds, values, step="post", color=color, alpha=0.15, linewidth=0)
        axes.step(seconds, values, where="post", color=color, linewidth=1.5)
    preempted = [after.seconds for before, after in pairwise(one.series) if after.preemptions > before.preemptions]
    if preempted:  # marks that are not clipped have no extent to lay out where there are none
        axes.plot(preempted, [0] * len(preempted), "x", color=WAITING, markersize=4, clip_on=False)
    axes.set_xlabel("seconds")


def _dress(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(0, max(1.0, axes.dataLim.y1 * HEADROOM, axes.get_ylim()[1]))
    plain_axes(axes, "y")
    axes.yaxis.set_major_formatter("{x:,g}")


def _counts(row: ArrivalsRow) -> str:
    """The line below a preset's name: its throughput, and what memory pressure led to."""
    if row.output_tok_s is None:
        return ""
    counts = (("demotions", row.demotions), ("preemptions", row.preemptions))
    return " · ".join([f"{row.output_tok_s:,.0f} tok/s", *(f"{n:,} {what}" for what, n in counts if n)])


def _title(row: ArrivalsRow) -> str:
    """Model and machine, then what came."""
    rate = {"inf": "all at once", TRACE: "at the times of a trace"}.get(row.rate, f"{row.rate} a second")
    lengths = f"{row.input_len:,.0f} tokens in, {row.output_len:,.0f} out"
    memory = f"; KV memory {format_size(row.kv_bytes_total)}" if row.kv_bytes_total else ""
    load = f"{row.requests:,} requests, {rate}: {row.task or lengths}{memory}"
    return literal(f"{subject(row)}\n{load}")


def _legend(figure: Figure, rungs: Mapping[str, Any], *, has_preemptions: bool, has_reserve: bool) -> None:
    """Below all panels, once. ``has_reserve``: a line shows the memory kept for steps down."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=color, label=literal(name)) for name, color in rungs.items()]
    handles += [Line2D([], [], color=color, label=name) for name, color in (("running", RUNNING), ("waiting", WAITING))]
    if has_preemptions:
        handles.append(Line2D([], [], color=WAITING, marker="x", markersize=4, linestyle="", label="preempted"))
    if has_reserve:
        handles.append(Line2D([], [], color=GREY, linewidth=0.8, linestyle=":", label="reserve"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), LEGEND_COLUMNS), frameon=False)
