"""The picture of a sweep: a PNG of the promised size, whatever rows there are."""

import html
import re
import struct

import pytest

from qkv_engine.bench.plots.panels import COLORS, MARKERS, tick_labels
from qkv_engine.bench.plots.picture import PLOT_SUFFIXES
from qkv_engine.bench.plots.sweep import plot_sweep

from .fake import make_row

MISSING = dict.fromkeys(("output_tok_s", "output_tok_s_min", "output_tok_s_max", "kv_bytes_peak", "kv_bytes_total"))


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_size() -> None:
    rows = [make_row(kv=kv, batch=batch) for kv in ("bf16", "fp32") for batch in (1, 2, 4)]
    assert size_of(plot_sweep(rows, dpi=100)) == (1100, 520)


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


def test_labels_that_would_overlap_stand_on_a_second_line_or_are_left_out() -> None:
    labels = tick_labels([1, 2, 4, 8, 16, 32, 57, 64, 108, 128, 200, 203, 256, 339])
    assert labels[:6] == ["1", "2", "4", "8", "16", "32"]
    assert labels[6:10] == ["\n57", "64", "\n108", "128"] and labels[12:] == ["\n256", "339"]
    assert sorted(labels[10:12]) == ["", "203"]
    assert tick_labels([300, 339]) == ["300", "339"]
    assert tick_labels([1023, 1024, 1025], width=60) == ["1,023", "\n1,024", "1,025"]


def svg_of(rows: list) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return plot_sweep(rows, kind="svg").decode()


def texts(svg: str) -> list[str]:
    """Every piece of text, in the order in which it is drawn."""
    return [html.unescape(text).strip() for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)]


def test_the_title_names_the_machine_and_the_lengths() -> None:
    row = {"device": "cuda:0", "device_name": "NVIDIA H200", "dtype": "bfloat16", "input_len": 7936, "output_len": 256}
    drawn = texts(svg_of([make_row(**row), make_row(**row, batch=2)]))
    assert "demo on NVIDIA H200, bfloat16: 7,936 tokens in, 256 out" in drawn


def test_the_title_names_the_task_in_place_of_averages() -> None:
    drawn = texts(svg_of([make_row(task="ledger 100", batch=batch, repeats=1) for batch in (8, 20)]))
    assert "demo on cpu, 2 threads, float32: ledger 100" in drawn and "Throughput" in drawn


def test_one_batch_is_bars_with_their_figures() -> None:
    rows = [make_row(kv="bf16", batch=8, output_tok_s=1234.4), make_row(kv="int4", batch=8, status="queued")]
    rows.append(make_row(kv="fp32", batch=8, status="does not fit", repeats=0, **MISSING))
    drawn = texts(svg_of(rows))
    assert {"1,234", "1,000", "does not fit", "bf16", "int4", "(queued)", "fp32"} <= set(drawn)
    assert not any("batch size" in text for text in drawn) and any("batch 8" in text for text in drawn)


def axes_of(rows: list, monkeypatch: pytest.MonkeyPatch) -> list:
    """The panels as they are saved."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    plot_sweep(rows)
    return figures[0].axes


def test_there_is_room_above_the_highest_point_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row(batch=batch, output_tok_s_max=9000.0, kv_bytes_peak=4 * 2**20) for batch in (1, 2)]
    speed, memory = axes_of(rows, monkeypatch)
    assert speed.get_ylim() == (0, pytest.approx(9000 * 1.12))
    assert memory.get_ylim() == (0, pytest.approx(4 * 1.12))
    (label,) = memory.texts
    assert label.get_text() == "KV memory 4.0 MiB"
    assert label.get_window_extent().y1 < memory.get_window_extent().y1


def test_what_does_not_fit_is_marked_below_the_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row(batch=batch) for batch in (1, 2)]
    rows += [make_row(kv=kv, batch=2, status="does not fit", repeats=0, **MISSING) for kv in ("fp32", "int8")]
    speed, memory = axes_of(rows, monkeypatch)
    for axes in (speed, memory):
        marks = [line for line in axes.lines if line.get_marker() == "x"]
        heights = [line.get_window_extent().y1 for line in marks]
        assert len(marks) == 2 and max(heights) < axes.get_window_extent().y0
        assert heights[0] != heights[1]
    assert speed.get_legend() is None and len(speed.figure.legends) == 1


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_forms(suffix: str, start: bytes) -> None:
    assert suffix in PLOT_SUFFIXES and len(PLOT_SUFFIXES) == 3
    assert plot_sweep([make_row()], kind=suffix[1:]).startswith(start)
