"""The picture of a sweep: a PNG of the promised size, whatever rows there are."""

import struct

import pytest

from qkv_engine.bench.plots import COLORS, MARKERS, _tick_labels, plot_sweep

from .fake import make_row

MISSING = dict.fromkeys(("output_tok_s", "output_tok_s_min", "output_tok_s_max", "kv_bytes_peak", "kv_bytes_total"))


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_size() -> None:
    rows = [make_row(kv=kv, batch=batch) for kv in ("bf16", "fp32") for batch in (1, 2, 4)]
    assert size_of(plot_sweep(rows, dpi=100)) == (1100, 480)


@pytest.mark.parametrize(
    "rows",
    [
        [make_row()],
        [make_row(status="does not fit", repeats=0, device=None, **MISSING)],
        [make_row(), make_row(batch=3, status="does not fit", repeats=0, **MISSING)],
        [make_row(kv=f"preset-{i}") for i in range(len(COLORS) + 2)],
        [make_row(), make_row(batch=2, status="queued")],
        [make_row(model="weird $name_ [x]")],
        [make_row(kv_bytes_peak=3 * 2**30, kv_bytes_total=4 * 2**30)],
    ],
)
def test_odd_rows_can_be_drawn(rows: list) -> None:
    plot_sweep(rows, dpi=40)


def test_colours_and_markers_are_distinct() -> None:
    assert len(set(COLORS)) == len(COLORS) == len(MARKERS) == len(set(MARKERS))


def test_labels_that_would_overlap_are_left_out() -> None:
    labels = _tick_labels([1, 2, 57, 64, 200, 203, 256, 339])
    assert labels == ["1", "2", "", "64", "200", "", "", "339"]
    assert _tick_labels([300, 339]) == ["", "339"]
