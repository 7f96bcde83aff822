"""Throughput and capacity against answers: the frontiers, the best row, capacities, the table; labels and pictures."""

import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qkv_engine.bench import sweep
from qkv_engine.bench.pareto import ParetoRow, best_rows, frontier, pareto_table, with_capacity
from qkv_engine.bench.plots import pareto as plot
from qkv_engine.bench.plots.labels import Box, Scene, place_labels
from qkv_engine.bench.plots.pareto import family_of, plot_pareto
from qkv_engine.bench.quality import Quality, rate
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.cli import bench
from qkv_engine.cli.main import main
from qkv_engine.errors import CapacityError
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS, main_presets
from studies.frontier import main as main_of_frontier
from studies.frontier import read_rows

from .answering import AnsweringEngine
from .fake import Clock, make_row
from .test_plots import size_of, texts

DEMO = config_from_hf(SHAPES["demo"])


def point(
    kv: str, speed: float | None = 100.0, capacity: int | None = 1000, right: float | None = 0.9, **row: Any
) -> ParetoRow:
    ends = {} if right is None else {"accuracy_low": max(0, right - 0.05), "accuracy_high": min(1, right + 0.02)}
    quality = Quality(eval_model="demo", eval_tasks="lookup 4", answers=40, accuracy=right, **ends)
    (rated,) = rate([make_row(kv=kv, output_tok_s=speed, **row)], {kv: quality})
    return ParetoRow(**vars(rated), capacity_tokens=capacity, floor_bytes_per_token=8192.0, floor_bits=16.0)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"a": (1, 0.9), "b": (2, 0.8), "c": (1.5, 0.7)}, ["a", "b"]),
        ({"a": (1, 0.9), "b": (2, 0.9)}, ["b"]),
        ({"a": (2, 0.9), "b": (2, 0.9)}, ["a"]),
        ({"a": (2, 0.8), "b": (2, 0.9)}, ["b"]),
        ({"a": (None, 0.9), "b": (1, None), "c": (1, 0.1)}, ["c"]),
        ({}, []),
    ],
)
def test_frontier(values: dict[str, tuple[float | None, float | None]], names: list[str]) -> None:
    assert frontier(values) == names


def test_of_several_sizes_the_fastest_counts() -> None:
    rows = [point("a", 1), point("a", 5, batch=4), point("a", None, batch=8), point("b", None), point("b", 2, batch=2)]
    assert [(row.kv, row.batch) for row in best_rows(rows)] == [("a", 4), ("b", 2)]


def test_capacity_is_that_of_the_floor() -> None:
    (row,) = rate([make_row(kv="auto", kv_bytes_total=64 * 2**20)], {})
    wide, auto = (with_capacity(row, PRESETS[kv], DEMO) for kv in ("bf16", "auto"))
    assert (wide.floor_bits, wide.floor_bytes_per_token) == (16, 8192)
    assert (auto.floor_bits, auto.floor_bytes_per_token) == (4.2812, 2192)
    assert 3 * (wide.capacity_tokens or 0) < (auto.capacity_tokens or 0) < 64 * 2**20 / 2192
    (row,) = rate([make_row(status="does not fit", kv_bytes_total=None)], {})
    assert with_capacity(row, PRESETS["bf16"], DEMO).capacity_tokens is None


def test_capacity_counts_layers_by_what_they_hold_of_a_request() -> None:
    """Of 3,000 tokens; where all layers have windows, tokens of all such requests that fit."""
    (row,) = rate([make_row(kv="int4", kv_bytes_total=64 * 2**20, input_len=2000, output_len=1000)], {})
    half, windows = (
        replace(DEMO, attention=tuple(s._replace(window=w) for s, w in zip(DEMO.attention, found, strict=True)))
        for found in ([None, 300] * 4, [300] * 8)
    )
    both, alone = (with_capacity(row, PRESETS["int4"], config) for config in (half, windows))
    plain = with_capacity(row, PRESETS["int4"], DEMO)
    nbytes, bits = plain.floor_bytes_per_token or 0, plain.floor_bits or 0
    assert both.floor_bytes_per_token == pytest.approx((nbytes + 8192 / 10) / 2)
    assert both.floor_bits == pytest.approx((bits + 16 / 10) / 1.1, abs=1e-4)
    assert (both.capacity_tokens or 0) > 1.8 * (plain.capacity_tokens or 0)
    assert (alone.capacity_tokens, alone.floor_bits) == (15 * 3000, 16)  # four blocks each, and a sink


def test_the_table_marks_both_frontiers() -> None:
    rows = [point("bf16", 100, 1000, 0.99), point("int4", 90, 4000, 0.99), point("kitty", 80, 3000, 0.7)]
    table = pareto_table(rows)
    assert [row[table.headers.index("frontier")] for row in table.cells] == ["speed", "capacity", ""]
    assert [row[table.headers.index("vs bf16")] for row in table.cells] == ["1.00x", "0.90x", "0.80x"]
    assert table.cells[1][table.headers.index("capacity tokens")] == "4,000"


def test_main_presets_are_those_of_the_registry_without_variants() -> None:
    assert {"bf16", "int4", "kivi-2", "kitty", "xquant", "patternkv", "pm-kvq-4", "auto-2"} <= set(main_presets())
    assert not {"kivi-2-g32", "kivi-2-sink", "xquant-g32-sink"} & set(main_presets())


# ---- pictures


def crowd(number: int) -> list[tuple[float, float]]:
    rng = random.Random(0)
    return [(150 + rng.gauss(0, 60), 200 + rng.gauss(0, 30)) for _ in range(number)]


@pytest.mark.parametrize("number", [1, 6, 22])
def test_labels_overlap_neither_one_another_nor_the_frame(number: int) -> None:
    frame = Box(0, 0, 320, 300)
    points = crowd(number)
    boxes = place_labels(Scene(points, frame), [(48.0, 9.0)] * number)
    assert all(frame.holds(box) for box in boxes)
    assert not any(one.overlaps(two) for i, one in enumerate(boxes) for two in boxes[:i])


def test_a_lonely_label_stands_beside_its_mark_to_the_right() -> None:
    (box,) = place_labels(Scene([(100.0, 100.0)], Box(0, 0, 300, 300)), [(40.0, 8.0)])
    assert box.left == pytest.approx(107) and box.bottom == pytest.approx(96)


def svg_of(rows: list[ParetoRow]) -> str:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return plot_pareto(rows, kind="svg").decode()


def test_the_picture_names_every_preset_with_answers_in_both_panels() -> None:
    rows = [point("bf16", 10, 10, 0.99), point("kivi-2", 30, 80, 0.6), point("int4", 20, 40, None)]
    drawn = texts(svg_of(rows))
    assert drawn.count("bf16") == drawn.count("kivi-2") == 2 and "int4" not in drawn
    assert any("lookup 4, 40 answers" in text for text in drawn)


def test_without_speeds_there_is_one_panel(tmp_path: Path) -> None:
    rows = [point("bf16", 10, 10, 0.99), point("kivi-2", 30, 80, 0.6)]
    path, picture = tmp_path / "rows.jsonl", tmp_path / "one.png"
    path.write_text("".join(json.dumps({"commit": "1a2b", **vars(row)}) + "\n" for row in rows))
    found = read_rows(path)
    assert [(row.kv, row.output_tok_s, row.capacity_tokens) for row in found] == [
        ("bf16", None, 10),
        ("kivi-2", None, 80),
    ]
    drawn = texts(svg_of(found))
    assert drawn.count("bf16") == drawn.count("kivi-2") == 1
    assert plot.CAPACITY in drawn and plot.SPEED not in drawn
    main_of_frontier(str(path), str(picture))
    assert size_of(picture.read_bytes()) == (1500, 810)


def test_size() -> None:
    assert size_of(plot_pareto([point("bf16"), point("auto", 300)], dpi=100)) == (1000, 540)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [point("bf16", right=None)],
        [point("bf16", None)],
        [point("weird $name_ [x]", right=1.0)],
        [point("a", right=0.0)],
    ],
)
def test_odd_rows_can_be_drawn(rows: list[ParetoRow]) -> None:
    assert plot_pareto(rows, dpi=40).startswith(b"\x89PNG")


def test_titles_say_that_steps_were_sampled() -> None:
    rows = [point("bf16", method="sampled"), point("auto", method="sampled")]
    assert "decode steps sampled" in pareto_table(rows).title
    assert any("decode steps sampled" in text for text in texts(svg_of(rows)))


def test_families() -> None:
    families = dict.fromkeys(family_of(kv) for kv in PRESETS)
    assert list(families) == ["bf", "fp", "int", "kivi", "xquant", "kitty", "patternkv", "pm", "auto"]


# ---- the command


TASKS = parse_tasks("addition:2", samples=3)
WORDS = ["bench", "--pareto", "--eval", "addition:2", "--samples", "3"]


def use(monkeypatch: pytest.MonkeyPatch, opened: list[tuple[str, int, bool]], **options: Any) -> None:
    """The command measures engines of exact times, all on one clock."""
    clock = Clock()

    def open_engine(args: Any, plan: Any, kv: Any) -> AnsweringEngine:
        opened.append((kv.name, max(plan.batches_of(kv.name)), kv.eager))
        return AnsweringEngine(clock=clock, tasks=TASKS, **options)

    monkeypatch.setattr(bench, "_open_engine", open_engine)
    monkeypatch.setattr(sweep, "sweep", partial(sweep.sweep, clock=clock))


def test_each_preset_runs_at_its_largest_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[tuple[str, int, bool]] = []
    use(monkeypatch, opened)
    assert main([*WORDS, "--kv", "bf16,auto", "-o", "json"]) == 0
    (_, wide, _), (_, narrow, _), floor = opened
    assert wide == 8 and narrow > 16  # memory for 8 at 16 bits
    assert floor == ("auto", narrow, True)
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kv"], row["batch"], row["accuracy"]) for row in rows] == [("bf16", 8, 1), ("auto", narrow, 1)]
    assert all(row["capacity_tokens"] > 0 and row["input_len"] == 1024 for row in rows)


def test_all_presets_at_a_given_size(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[tuple[str, int, bool]] = []
    use(monkeypatch, opened)
    assert main([*WORDS, "--batch-sweep", "1,2"]) == 0
    out = capsys.readouterr().out
    assert [kv for kv in main_presets() if not re.search(rf"^{re.escape(kv)} +2 ", out, re.MULTILINE)] == []


def test_rows_are_delivered_before_the_picture_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"

    def draw(*args: Any, **options: Any) -> bytes:
        assert len(rows.read_text().splitlines()) == 1
        raise RuntimeError("no font")

    use(monkeypatch, [])
    monkeypatch.setattr(plot, "plot_pareto", draw)
    words = ["--kv", "bf16", "--output", str(rows), "--plot", str(tmp_path / "p.png")]
    assert main([*WORDS, *words]) == 1
    out, err = capsys.readouterr()
    assert "capacity tokens" in out and "no font" in err and "wrote 1 row to" in err


def test_presets_that_do_not_fit_are_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(args: Any, plan: Any, kv: Any) -> AnsweringEngine:
        raise CapacityError("no room for one block")

    monkeypatch.setattr(bench, "_open_engine", refuse)
    assert main([*WORDS, "--kv", "bf16,int4", "--kv-memory", "1000"]) == 3
    assert capsys.readouterr().out.count("does not fit") >= 2
