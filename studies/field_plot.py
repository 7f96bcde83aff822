"""Plot of the spectral study: divergence, and right answers, against bits with all metadata; a line for spectral KV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qkv_engine.bench.divergence import Mean
from qkv_engine.bench.files import write_file
from qkv_engine.bench.plots.labels import Box, Scene, place_labels
from qkv_engine.bench.plots.panels import COLORS, GREY, MARKERS
from qkv_engine.bench.plots.picture import as_file, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (11.0, 5.2)  # inches
MARK, LABEL, NEAR = 3.6, 8.5, 9.0  # points: half a mark, letters, distance of a label that needs no line
LEAST = 1e-7  # nats that are drawn
KINDS = {"seeds": "papers with presets here", "beside": "other papers", "engine": "this engine, channels as they are"}
KINDS |= {"spectral": "this engine, spectral"}


class FieldPoint(NamedTuple):
    """A scheme: name, kind, bits with all metadata, nats a token, and share of right answers."""

    name: str
    kind: str
    bits: float
    divergence: Mean
    accuracy: Mean


class Panel(NamedTuple):
    axes: Axes
    points: Sequence[FieldPoint]
    value: Callable[[FieldPoint], Mean]

    def at(self, bits: float, value: float) -> tuple[float, float]:
        """A place in points."""
        figure = self.axes.get_figure()
        assert figure is not None
        x, y = self.axes.transData.transform((bits, value)) * (72 / figure.dpi)
        return float(x), float(y)


def draw(points: Sequence[FieldPoint], path: Path, title: str) -> None:
    """Writes the picture to ``path``, a .png; 16 bits are a line. Raises ``ConfigError`` without matplotlib."""
    figure = new_figure(SIZE, 150)
    left, right = figure.subplots(1, 2)
    quantized = [point for point in points if point.bits < 16]
    panels = Panel(left, quantized, lambda p: _logarithmic(p.divergence)), Panel(right, quantized, _percent)
    for panel in panels:
        _marks(panel)
        panel.axes.set_xlabel("bits an element of K and V on the floor, all metadata counted")
        plain_axes(panel.axes)
        panel.axes.margins(0.12, 0.1)
    left.set_yscale("log")
    left.set_ylabel("KL divergence from 16 bits, nats a token of a reply")
    right.set_ylabel("right answers, %, mean of the tasks")
    for point in (point for point in points if point.bits >= 16):
        right.axhline(100 * point.accuracy.mean, color=GREY, linestyle="--", linewidth=1, label="16 bits")
    right.legend(frameon=False, fontsize="small", loc="lower right")
    figure.suptitle(title, fontsize="medium", fontweight="bold")
    figure.draw_without_rendering()  # labels need the axes where they will stand
    for panel in panels:
        _label(panel)
    write_file(path, as_file(figure, "png"))


def _logarithmic(found: Mean) -> Mean:
    return Mean(*(max(LEAST, x) for x in found))


def _percent(point: FieldPoint) -> Mean:
    return Mean(*(100 * x for x in point.accuracy))


def _marks(panel: Panel) -> None:
    """Marks with their intervals, a colour a kind; spectral ones are joined."""
    for index, (kind, name) in enumerate(KINDS.items()):
        mine = sorted((point for point in panel.points if point.kind == kind), key=lambda point: point.bits)
        if not mine:
            continue
        found = [panel.value(point) for point in mine]
        panel.axes.errorbar(
            [point.bits for point in mine],
            [one.mean for one in found],
            yerr=[[max(0.0, one.mean - one.low) for one in found], [max(0.0, one.high - one.mean) for one in found]],
            color=COLORS[index],
            marker=MARKERS[index],
            markersize=2 * MARK,
            linestyle="-" if kind == "spectral" else "none",
            elinewidth=0.9,
            capsize=2,
            label=name,
            zorder=3,
        )


def _label(panel: Panel) -> None:
    """Names beside the marks, joined to those that are not near."""
    axes, figure = panel.axes, panel.axes.get_figure()
    assert figure is not None
    values = [panel.value(point) for point in panel.points]
    points = [panel.at(point.bits, one.mean) for point, one in zip(panel.points, values, strict=True)]
    obstacles = []
    for (x, y), point, one in zip(points, panel.points, values, strict=True):
        low, high = (panel.at(point.bits, end)[1] for end in (one.low, one.high))
        obstacles += [Box(x - MARK, y - MARK, x + MARK, y + MARK), Box(x - 1.5, low, x + 1.5, high)]
    texts = [axes.text(0, 0, point.name, fontsize=LABEL) for point in panel.points]
    extents = [text.get_window_extent() for text in texts]
    sizes = [(extent.width * 72 / figure.dpi, extent.height * 72 / figure.dpi) for extent in extents]
    for text in texts:
        text.remove()
    frame = Box(*(float(end) * 72 / figure.dpi for end in axes.get_window_extent().extents))
    for i, box in enumerate(place_labels(Scene(points, frame, obstacles), sizes)):
        (x, y), point = points[i], panel.points[i]
        end = box.nearest(x, y)
        line = {"arrowstyle": "-", "shrinkA": 0, "shrinkB": MARK, "color": GREY, "linewidth": 0.6}
        line["relpos"] = ((end[0] - box.left) / sizes[i][0], (end[1] - box.bottom) / sizes[i][1])
        axes.annotate(
            point.name,
            (point.bits, values[i].mean),
            (box.left - x, box.bottom - y),
            textcoords="offset points",
            va="bottom",
            fontsize=LABEL,
            arrowprops=line if math.dist((x, y), end) > NEAR else None,
            in_layout=False,
        )
