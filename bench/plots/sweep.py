"""A sweep as a picture: throughput and KV memory against batch size, one line a preset; bars for a single batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..status import QUEUED
from ..sweep import SAMPLED, SweepRow
from .panels import GREY, Presets, draw_bars, draw_lines
from .paper import draw_ratios
from .picture import as_file, literal, new_figure, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..papers import Experiment

SIZE, PAPER_SIZE, PAD = (11.0, 5.2), (14.0, 5.6), 0.12  # inches


def plot_sweep(
    rows: Sequence[SweepRow], *, kind: str = "png", dpi: int = 150, experiment: Experiment | None = None
) -> bytes:
    """The picture of a sweep, 11 x 5.2 inches, as "png", "svg" or "pdf".

    A paper's ``experiment`` is 14 x 5.6 inches, with the published ratio in a third panel.
    """
    figure = new_figure(SIZE if experiment is None else PAPER_SIZE, dpi, pad=PAD)
    ratios = (1, 1) if experiment is None else (1, 1, 0.62)
    speed, memory, *others = figure.subplots(1, len(ratios), width_ratios=ratios)
    presets = Presets.of(rows)
    is_one_batch = len({row.batch for row in rows}) == 1
    (draw_bars if is_one_batch else draw_lines)(speed, memory, rows, presets)
    speed.set_title("Throughput" + _band(rows, is_one_batch), fontsize="medium")
    memory.set_title("KV memory in use at the peak", fontsize="medium")
    title = _title(rows, is_one_batch)
    if experiment is not None:
        title = f"{experiment.title}\n{title}"
        draw_ratios(others[0], rows, presets, experiment.paper)
    figure.suptitle(title, fontweight="bold")
    if not is_one_batch:
        _legend(figure, rows, presets)
    return as_file(figure, kind)


def _band(rows: Sequence[SweepRow], is_one_batch: bool) -> str:
    if max((row.repeats for row in rows), default=0) < 2:
        return ""
    what = "steps" if rows[0].method == SAMPLED else "run"
    return f" ({'line' if is_one_batch else 'band'}: slowest to fastest {what})"


def _title(rows: Sequence[SweepRow], is_one_batch: bool) -> str:
    """Model, machine, dtype; the task or the lengths; the batch size where there is only one."""
    ran = next((row for row in rows if row.repeats), rows[0])
    if ran.task:
        what = f"{ran.batch:,} requests of {ran.task}" if is_one_batch else ran.task
    else:
        batch = f", batch {ran.batch:,}" if is_one_batch else ""
        what = f"{ran.input_len:,} tokens in, {ran.output_len:,} out{batch}"
    what += ", decode steps sampled" if ran.method == SAMPLED else ""
    return literal(f"{subject(ran)}: {what}")


def _legend(figure: Figure, rows: Sequence[SweepRow], presets: Presets) -> None:
    """Below both panels, where no line runs."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=p.color, marker=p.marker, label=literal(p.kv)) for p in presets]
    if any(row.status == QUEUED for row in rows):
        label = "queued: not all at once"
        handles.append(Line2D([], [], color=GREY, marker="o", markerfacecolor="white", linestyle="", label=label))
    missing = sorted({row.status for row in rows if row.output_tok_s is None})
    if missing:
        label = " or ".join(missing)
        handles.append(Line2D([], [], color=GREY, marker="x", linestyle="", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), frameon=False)
