"""A sweep as a picture: throughput and KV memory against batch size, one line a preset."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qkv_engine.config import format_size
from qkv_engine.errors import ConfigError

from .sweep import QUEUED, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without yellow: told apart with every kind of colour vision, and by marker in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"


def require_matplotlib() -> None:
    """Raises ``ConfigError`` naming the extra that has it, so that nobody learns it after a long run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "plots need matplotlib", field="plot", remedy="Install it with: pip install 'qkv-engine[bench]'"
        ) from None


def plot_sweep(rows: Sequence[Row], dpi: int = 150) -> bytes:
    """The PNG of a sweep, 11 x 4.8 inches."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    margins = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)  # inches
    figure = Figure(figsize=(11, 4.8), dpi=dpi, layout=margins)
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2, sharex=True)
    _draw_speed(speed, rows)
    _draw_memory(memory, rows)
    _label(figure, rows)
    for axes in (speed, memory):
        _dress(axes, rows)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _presets(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Preset, colour and marker, in the order of the sweep."""
    kvs = list(dict.fromkeys(row.kv for row in rows))
    return [(kv, COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, kv in enumerate(kvs)]


def _draw_speed(axes: Axes, rows: Sequence[Row]) -> None:
    for kv, color, marker in _presets(rows):
        mine = [row for row in rows if row.kv == kv and row.output_tok_s is not None]
        batches = [row.batch for row in mine]
        axes.plot(batches, [row.output_tok_s or 0 for row in mine], color=color, marker=marker, label=kv)
        low, high = ([getattr(row, f"output_tok_s_{end}") for row in mine] for end in ("min", "max"))
        axes.fill_between(batches, low, high, color=color, alpha=0.18, linewidth=0)
    axes.set_title("Throughput (band: slowest to fastest run)")
    axes.set_ylabel("output tokens per second")
    _mark_exceptions(axes, rows)
    axes.legend(frameon=False, title="KV", alignment="left", loc="upper left")


def _mark_exceptions(axes: Axes, rows: Sequence[Row]) -> None:
    """Queued sizes as hollow points; sizes without a figure as crosses, every preset at a height of its own."""
    above = axes.get_xaxis_transform()  # x in data, y as a share of the axes
    for i, (kv, color, marker) in enumerate(_presets(rows)):
        mine = [row for row in rows if row.kv == kv]
        missing = [row.batch for row in mine if row.output_tok_s is None]
        if missing:
            heights = [0.025 + 0.03 * i] * len(missing)
            axes.plot(missing, heights, color=color, marker="x", linestyle="", transform=above)
        queued = [(row.batch, row.output_tok_s or 0) for row in mine if row.status == QUEUED]
        for batch, rate in queued:
            axes.plot(batch, rate, color=color, marker=marker, markerfacecolor="white")
    statuses = {row.status for row in rows if row.output_tok_s is None}
    if statuses:
        axes.plot([], [], color=GREY, marker="x", linestyle="", label=" or ".join(sorted(statuses)))
    if any(row.status == QUEUED for row in rows):
        label = "queued: not all at once"
        axes.plot([], [], color=GREY, marker="o", markerfacecolor="white", linestyle="", label=label)


def _draw_memory(axes: Axes, rows: Sequence[Row]) -> None:
    most = max((row.kv_bytes_peak or 0 for row in rows), default=0)
    unit, divisor = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    for kv, color, marker in _presets(rows):
        mine = [row for row in rows if row.kv == kv and row.kv_bytes_peak is not None]
        peaks = [(row.kv_bytes_peak or 0) / divisor for row in mine]
        axes.plot([row.batch for row in mine], peaks, color=color, marker=marker, label=kv)
    limits = {row.kv_bytes_total for row in rows if row.kv_bytes_total}
    # A limit far above every peak would only flatten the lines.
    if len(limits) == 1 and (limit := limits.pop()) <= 1.5 * most:
        axes.axhline(limit / divisor, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"KV memory {format_size(limit)}",
            (0.01, limit / divisor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=GREY,
            fontsize="small",
        )
    axes.set_title("KV memory in use at the peak")
    axes.set_ylabel(unit)


def _label(figure: Figure, rows: Sequence[Row]) -> None:
    ran = next((row for row in rows if row.repeats), rows[0])
    where = ", ".join(part for part in (ran.device, ran.dtype) if part)
    title = f"{ran.model}{f' on {where}' if where else ''}: {ran.input_len} tokens in, {ran.output_len} out"
    figure.suptitle(title, fontweight="bold")


def _dress(axes: Axes, rows: Sequence[Row]) -> None:
    batches = sorted({row.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, _tick_labels(batches))
    axes.minorticks_off()
    axes.set_xlabel("batch size (requests)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.04)
    axes.grid(color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter("{x:,g}")


def _tick_labels(batches: Sequence[int]) -> list[str]:
    """Sizes that would be written over each other stay blank; powers of two and the largest go first."""
    kept: list[int] = []
    for batch in sorted(batches, key=lambda n: (n != max(batches), n & (n - 1) != 0, n)):
        if all(max(batch, other) >= 1.4 * min(batch, other) for other in kept):
            kept.append(batch)
    return [str(batch) if batch in kept else "" for batch in batches]
