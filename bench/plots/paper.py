"""The third panel of a paper's picture: each preset's best throughput over the first one's, and the published ratio."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..papers import Paper
from ..sweep import SweepRow
from .panels import GREY, Presets
from .picture import literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOM = 1.5  # of the longest bar: room beyond it for its figure
BAR = 0.62  # of the distance between two bars
CAPTION_WIDTH = 46  # characters of a line


def best_ratios(rows: Sequence[SweepRow]) -> dict[str, float]:
    """The best throughput of each preset as a multiple of the first one's; nothing where that did not run."""
    best: dict[str, float] = {}
    for row in rows:
        if row.output_tok_s:
            best[row.kv] = max(best.get(row.kv, 0.0), row.output_tok_s)
    base = best.get(rows[0].kv)
    return {kv: rate / base for kv, rate in best.items()} if base else {}


def draw_ratios(axes: Axes, rows: Sequence[SweepRow], presets: Presets, paper: Paper) -> None:
    """Horizontal bars: ours in the presets' colours, below them the published range in grey."""
    found = best_ratios(rows)
    bars = [(p.kv, 0.0, found[p.kv], p.color, f"{found[p.kv]:.2f}x") for p in presets if p.kv in found]
    if paper.throughput is not None:
        low, high = paper.throughput
        text = f"{high:g}x" if low == high else f"{low:g}x to {high:g}x"
        bars.append(("published", 0.0 if low == high else low, high, GREY, text))
    for i, (_, start, end, color, text) in enumerate(bars):
        axes.barh(i, end - start, left=start, height=BAR, color=color)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the line at 1
        axes.annotate(text, (end, i), (5, 0), textcoords="offset points", va="center", fontsize="small", bbox=box)
    axes.set_yticks(range(len(bars)), [literal(name) for name, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, ROOM * max((end for _, _, end, *_ in bars), default=1.0))
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1, zorder=0)
    label = f"times {rows[0].kv} at its best batch"
    axes.set_xlabel(literal("\n".join([label, *caption(paper)])), fontsize="small")
    axes.set_title("Best throughput", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


def caption(paper: Paper) -> list[str]:
    """The machine and the baseline of the published ratio, in lines of the panel's width."""
    if paper.throughput is None:
        return []
    return textwrap.wrap(f"published: over {paper.baseline}; {paper.hardware}", CAPTION_WIDTH)
