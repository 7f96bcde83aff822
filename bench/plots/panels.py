"""The two panels of a sweep's picture, throughput and KV memory: lines against batch size, or bars for one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.sizes import format_size

from ..status import QUEUED
from ..sweep import SweepRow
from .picture import literal, plain_axes, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette without yellow: told apart with every kind of colour vision, and by marker in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
HEADROOM = 1.12  # of the highest value: room above it for marks and the limit's label
LIMIT_IN_SIGHT = 1.5  # of the highest peak; a limit far above it would only flatten the lines
PANEL_WIDTH = 300.0  # points of an axis in the finished picture, about
DIGIT_WIDTH, LABEL_GAP = 6.4, 4.0  # points of a tick label
MARK_ROW = 8.0  # points between rows of marks below the axis


class Preset(NamedTuple):
    """Color and marker of a preset's rows."""

    kv: str
    color: str
    marker: str

    @property
    def style(self) -> dict[str, Any]:
        """Style of the preset's lines; points on the axis are drawn whole."""
        return {"color": self.color, "marker": self.marker, "clip_on": False}


class Presets(tuple[Preset, ...]):
    """The presets of a sweep in its order, each with a colour and a marker."""

    @classmethod
    def of(cls, rows: Sequence[SweepRow]) -> Presets:
        kvs = dict.fromkeys(row.kv for row in rows)
        return cls(Preset(kv, COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, kv in enumerate(kvs))


def draw_lines(speed: Axes, memory: Axes, rows: Sequence[SweepRow], presets: Presets) -> None:
    """Both panels against batch size; sizes that did not run are marked below the axis."""
    unit, divisor = unit_of(max(row.kv_bytes_peak or 0 for row in rows))
    for preset, mine in _by_preset(rows, presets):
        ran = [row for row in mine if row.output_tok_s is not None]
        if not ran:
            continue
        batches, style = [row.batch for row in ran], preset.style
        speed.plot(batches, [row.output_tok_s or 0 for row in ran], **style)
        low, high = ([getattr(row, f"output_tok_s_{end}") for row in ran] for end in ("min", "max"))
        speed.fill_between(batches, low, high, color=preset.color, alpha=0.18, linewidth=0)
        memory.plot(batches, [(row.kv_bytes_peak or 0) / divisor for row in ran], **style)
        for row in ran:
            if row.status == QUEUED:
                hollow = style | {"markerfacecolor": "white"}
                speed.plot(row.batch, row.output_tok_s or 0, **hollow)
                memory.plot(row.batch, (row.kv_bytes_peak or 0) / divisor, **hollow)
    for axes in (speed, memory):
        _mark_missing(axes, rows, presets)
        _dress_batches(axes, rows)
    _finish(speed, memory, rows, unit, divisor)


def draw_bars(speed: Axes, memory: Axes, rows: Sequence[SweepRow], presets: Presets) -> None:
    """Both panels by preset, with the figure on each bar; what did not run says so where its bar would stand."""
    unit, divisor = unit_of(max(row.kv_bytes_peak or 0 for row in rows))
    for i, (preset, (row, *_)) in enumerate(_by_preset(rows, presets)):
        values = (row.output_tok_s, None if row.kv_bytes_peak is None else row.kv_bytes_peak / divisor)
        for axes, value in zip((speed, memory), values, strict=True):
            axes.bar(i, value or 0, width=0.6, color=preset.color)
            if row.status == QUEUED:
                axes.bar(i, value or 0, width=0.6, color="white", alpha=0.75, hatch="//", edgecolor=preset.color)
            text = row.status if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
            axes.annotate(text, (i, value or 0), (0, 4), textcoords="offset points", ha="center", fontsize="small")
        if row.repeats > 1 and row.output_tok_s is not None:
            ends = [row.output_tok_s_min or 0], [row.output_tok_s_max or 0]
            speed.vlines([i + 0.24], *ends, color="black", linewidth=1.5)
    for axes in (speed, memory):
        queued = {row.kv for row in rows if row.status == QUEUED}
        names = [f"{p.kv}\n(queued)" if p.kv in queued else p.kv for p in presets]
        axes.set_xticks(range(len(presets)), [literal(name) for name in names])
        axes.set_xlim(-0.7, len(presets) - 0.3)
    _finish(speed, memory, rows, unit, divisor)


def tick_labels(batches: Sequence[int], width: float = PANEL_WIDTH) -> list[str]:
    """Labels of a logarithmic axis of ``width`` points: on a second line, or blank, where they would overlap.

    The largest size and powers of two go first.
    """
    low, high = math.log2(min(batches)), math.log2(max(batches))
    kept: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    labels: dict[int, str] = {}
    for batch in sorted(batches, key=lambda n: (n != max(batches), n & (n - 1) != 0, n)):
        middle = (math.log2(batch) - low) / max(high - low, 1e-9) * width
        half = (DIGIT_WIDTH * len(f"{batch:,}") + LABEL_GAP) / 2
        for line, taken in enumerate(kept):
            if all(middle + half <= left or right <= middle - half for left, right in taken):
                taken.append((middle - half, middle + half))
                labels[batch] = "\n" * line + f"{batch:,}"
                break
    return [labels.get(batch, "") for batch in batches]


def _by_preset(rows: Sequence[SweepRow], presets: Presets) -> Iterator[tuple[Preset, list[SweepRow]]]:
    for preset in presets:
        yield preset, [row for row in rows if row.kv == preset.kv]


def _mark_missing(axes: Axes, rows: Sequence[SweepRow], presets: Presets) -> None:
    """Crosses below the axis at sizes without a figure, a row for each preset that has some."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None
    missing = [(p, [row.batch for row in mine if row.output_tok_s is None]) for p, mine in _by_preset(rows, presets)]
    missing = [(preset, batches) for preset, batches in missing if batches]
    for i, (preset, batches) in enumerate(missing):
        down = ScaledTranslation(0, -MARK_ROW * (i + 0.75) / 72, figure.dpi_scale_trans)
        axes.plot(
            batches,
            [0] * len(batches),
            color=preset.color,
            marker="x",
            markersize=5,
            linestyle="",
            clip_on=False,
            transform=axes.get_xaxis_transform() + down,  # x in data, y from the axis down
        )
    axes.tick_params(axis="x", pad=3.5 + MARK_ROW * len(missing))


def _dress_batches(axes: Axes, rows: Sequence[SweepRow]) -> None:
    batches = sorted({row.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, tick_labels(batches))
    axes.minorticks_off()
    axes.set_xlabel("batch size (requests)")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.7)
    margin = (max(batches) / min(batches)) ** 0.04
    axes.set_xlim(min(batches) / margin, max(batches) * margin)


def _finish(speed: Axes, memory: Axes, rows: Sequence[SweepRow], unit: str, divisor: int) -> None:
    """Labels, scales from zero with room above, and the KV memory there is."""
    speed.set_ylabel("output tokens per second")
    memory.set_ylabel(unit)
    peak = max((row.kv_bytes_peak or 0 for row in rows), default=0) / divisor
    fastest = max((max(row.output_tok_s_max or 0, row.output_tok_s or 0) for row in rows), default=0)
    limit = _limit(rows, divisor, peak)
    if limit is not None:
        memory.axhline(limit, color=GREY, linestyle="--", linewidth=1)
        label = f"KV memory {format_size(limit * divisor)}"
        memory.annotate(
            label,
            (0.01, limit),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=GREY,
            fontsize="small",
        )
    for axes, most in ((speed, fastest), (memory, max(peak, limit or 0))):
        axes.set_ylim(0, HEADROOM * most or 1)
        plain_axes(axes, "y")
        axes.yaxis.set_major_formatter("{x:,g}")


def _limit(rows: Sequence[SweepRow], divisor: int, peak: float) -> float | None:
    """The KV memory of all rows, if it is one and near enough to be shown."""
    limits = {row.kv_bytes_total for row in rows if row.kv_bytes_total}
    if len(limits) != 1:
        return None
    limit = limits.pop() / divisor
    return limit if limit <= LIMIT_IN_SIGHT * peak else None
