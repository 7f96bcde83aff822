"""Presets as points: right answers against throughput and against capacity, with error bars and both frontiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..pareto import ParetoRow, best_rows, capacity_frontier, speed_frontier
from ..quality import right_header
from ..sweep import SAMPLED
from .labels import Box, Line, Scene, place_labels
from .panels import COLORS, GREY, MARKERS
from .picture import as_file, literal, new_figure, plain_axes, subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEED = "output tokens per second"
CAPACITY = "capacity: tokens, all blocks on the floor"
SIZE = (10.0, 5.4)  # inches; labels stay legible at the width of a README
MARK = 3.6  # points from the middle of a mark to its edge
NEAR = 9.0  # points from a mark to its label that need no line
LABEL = 8.5  # points of the letters of a label
HEADROOM, MARGIN = 0.14, 1.15  # room for labels: share of the scale above 100 %, and times the highest gain


class Panel(NamedTuple):
    """One of the two plots: rows that have it with their gain, the names of those on the frontier, and the gain's."""

    axes: Axes
    points: list[tuple[ParetoRow, float]]
    front: list[str]
    gain: str

    @property
    def stair(self) -> list[Line]:
        """The frontier in data: down from each of its points, and on to the next."""
        corners = sorted((gain, percent(row.accuracy)) for row, gain in self.points if row.kv in self.front)
        return [
            line
            for (x, y), (next_x, next_y) in pairwise(corners)
            for line in (((x, y), (x, next_y)), ((x, next_y), (next_x, next_y)))
        ]


def plot_pareto(rows: Sequence[ParetoRow], *, kind: str = "png", dpi: int = 150) -> bytes:
    """The best row of each preset with answers, 10 x 5.4 inches, as "png", "svg" or "pdf".

    Capacity alone if no row has a speed.
    """
    figure = new_figure(SIZE, dpi)
    rows = [row for row in best_rows(rows) if row.accuracy is not None]
    speeds = [(row, row.output_tok_s) for row in rows if row.output_tok_s is not None]
    capacities = [(row, float(row.capacity_tokens)) for row in rows if row.capacity_tokens is not None]
    found = [(speeds, speed_frontier(rows), SPEED)] if speeds or not capacities else []
    found.append((capacities, capacity_frontier(rows), CAPACITY))
    axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    panels = [Panel(each, *what) for each, what in zip(axes, found, strict=True)]
    families = list(dict.fromkeys(family_of(row.kv) for row in rows))
    for panel in panels:
        _draw(panel, families)
    _dress(figure, panels, rows)
    figure.draw_without_rendering()  # labels need the axes where they will stand
    for panel in panels:
        _label(panel)
    return as_file(figure, kind)


def family_of(kv: str) -> str:
    """The family of a preset or plan by its name: "int8" and "int4" are "int", "kivi-2" and "kivi-4" are "kivi"."""
    return kv.split("-")[0].rstrip("0123456789.")


def percent(share: float | None) -> float:
    return 100 * (share or 0)


def _draw(panel: Panel, families: Sequence[str]) -> None:
    """A mark with its interval for each row, full on the frontier, and the frontier as a stair."""
    for row, gain in panel.points:
        number, right = families.index(family_of(row.kv)), percent(row.accuracy)
        color = COLORS[number % len(COLORS)]
        panel.axes.errorbar(
            gain,
            right,
            yerr=[[max(0.0, right - percent(row.accuracy_low))], [max(0.0, percent(row.accuracy_high) - right)]],
            color=color,
            marker=MARKERS[(number + number // len(COLORS)) % len(MARKERS)],
            markersize=2 * MARK,
            markerfacecolor=color if row.kv in panel.front else "white",
            elinewidth=0.9,
            capsize=2,
            zorder=3,
        )
    for start, end in panel.stair:
        panel.axes.plot(*zip(start, end, strict=True), color=GREY, linestyle="--", linewidth=1, zorder=2)


def _dress(figure: Figure, panels: Sequence[Panel], rows: Sequence[ParetoRow]) -> None:
    """Titles, scales and grids; gains begin at zero, accuracy ends at 100 % with room for labels above."""
    first = panels[0].axes
    first.set_ylabel(f"{right_header(rows[0])}, %" if rows else "right, %")
    bottom = 10 * math.floor(min((percent(row.accuracy_low) for row in rows), default=0) / 10)
    first.set_ylim(bottom - 2, 100 + HEADROOM * (100 - bottom))
    first.set_yticks(range(bottom, 101, 10))
    for axes, points, _, gain in panels:
        axes.set_xlabel(gain)
        axes.set_xlim(0, MARGIN * max((gain for _, gain in points), default=1))
        axes.locator_params(axis="x", nbins=6)
        plain_axes(axes)
        axes.xaxis.set_major_formatter(_short)
    figure.suptitle(literal(_title(rows)), fontsize="medium", fontweight="bold")


def _short(value: float, _: object = None) -> str:
    """A number as an axis has it: 250, 12,500, 400k, 1.2M."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e5 else f"{value:,g}"


def _title(rows: Sequence[ParetoRow]) -> str:
    if not rows:
        return "no preset has answers"
    ran = next((row for row in rows if row.repeats), rows[0])
    head = f"{subject(ran)}: {ran.input_len:,} tokens in, {ran.output_len:,} out"
    head += ", decode steps sampled" if ran.method == SAMPLED else ""
    return f"{head}\nright: mean of {ran.eval_tasks}, {ran.answers:,} answers, bars 95 %; dashed: frontier"


def _label(panel: Panel) -> None:
    """The names of the presets beside their marks, those of the frontier in bold."""
    styles: list[dict[str, Any]] = [
        {"fontsize": LABEL, "fontweight": "bold" if row.kv in panel.front else "normal"} for row, _ in panel.points
    ]
    names = [literal(row.kv) for row, _ in panel.points]
    scene, sizes = _scene(panel), []
    for name, style in zip(names, styles, strict=True):
        text = panel.axes.text(0, 0, name, **style)
        extent = text.get_window_extent()
        sizes.append((extent.width * _points_a_pixel(panel), extent.height * _points_a_pixel(panel)))
        text.remove()
    for i, box in enumerate(place_labels(scene, sizes)):
        (x, y), (row, gain) = scene.points[i], panel.points[i]
        end = box.nearest(x, y)
        line = {
            "arrowstyle": "-",
            "relpos": ((end[0] - box.left) / sizes[i][0], (end[1] - box.bottom) / sizes[i][1]),
            "shrinkA": 0,
            "shrinkB": MARK,
            "color": GREY,
            "linewidth": 0.6,
        }
        panel.axes.annotate(
            names[i],
            (gain, percent(row.accuracy)),
            (box.left - x, box.bottom - y),
            textcoords="offset points",
            va="bottom",
            color="black" if row.kv in panel.front else "#444444",
            arrowprops=line if math.dist((x, y), end) > NEAR else None,
            in_layout=False,
            **styles[i],
        )


def _scene(panel: Panel) -> Scene:
    """The panel in points: its marks and error bars are obstacles, the frontier is lines."""
    axes = panel.axes

    def at(gain: float, right: float) -> tuple[float, float]:
        x, y = axes.transData.transform((gain, right)) * _points_a_pixel(panel)
        return float(x), float(y)

    points, obstacles = [at(gain, percent(row.accuracy)) for row, gain in panel.points], []
    for (x, y), (row, gain) in zip(points, panel.points, strict=True):
        low, high = (at(gain, percent(end))[1] for end in (row.accuracy_low, row.accuracy_high))
        obstacles += [Box(x - MARK, y - MARK, x + MARK, y + MARK), Box(x - 1.5, low, x + 1.5, high)]
    frame = Box(*(float(end) * _points_a_pixel(panel) for end in axes.get_window_extent().extents))
    return Scene(points, frame, obstacles, [(at(*start), at(*end)) for start, end in panel.stair])


def _points_a_pixel(panel: Panel) -> float:
    figure = panel.axes.get_figure()
    assert figure is not None
    return 72 / figure.dpi
