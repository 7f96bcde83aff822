"""Common parts of the pictures: the figure, its file, texts and axes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

from qkv_engine.errors import ConfigError, remedy_of_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..arrivals_row import ArrivalsRow
    from ..sweep import SweepRow

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PAD = 0.08  # inches around and between panels


def require_matplotlib() -> None:
    """Raises ``ConfigError``, naming the extra, where matplotlib is not installed; called before a long run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib", field="plot", remedy=remedy_of_extra("bench")) from None


def new_figure(size: tuple[float, float], dpi: int, *, pad: float = PAD) -> Figure:
    """An empty figure of ``size`` in inches, with a canvas of its own. Raises ``ConfigError`` without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=size, dpi=dpi, layout=ConstrainedLayoutEngine(w_pad=pad, h_pad=pad))
    FigureCanvasAgg(figure)
    return figure


def as_file(figure: Figure, kind: str) -> bytes:
    """The contents of a file of ``figure``, as "png", "svg" or "pdf"."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind)
    return picture.getvalue()


def subject(row: SweepRow | ArrivalsRow) -> str:
    """Model, machine and dtype of a picture's title: "demo on NVIDIA H200, bfloat16"."""
    where = ", ".join(part for part in (row.machine, row.dtype) if part)
    return f"{row.model} on {where}" if where else row.model


def unit_of(most: int) -> tuple[str, int]:
    """The unit of an axis of up to ``most`` bytes: its name and its bytes."""
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def literal(text: str) -> str:
    """``text`` without mathematics: a name may hold dollar signs."""
    return text.replace("$", r"\$")


def plain_axes(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Leaves ``axes`` two of its spines and a pale grid, of "x", "y" or "both", behind the data."""
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
