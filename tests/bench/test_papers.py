"""The papers' experiments: records against the published figures, every one scaled down, one of them for real."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qkv_engine.bench.papers import PAPERS, Experiment
from qkv_engine.bench.plots.paper import best_ratios
from qkv_engine.bench.plots.sweep import plot_sweep
from qkv_engine.bench.sizing import make_ladder
from qkv_engine.cli import bench
from qkv_engine.cli.common import kv_ladders
from qkv_engine.cli.main import main
from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS

from .fake import FakeEngine, make_row

# Shape, prompt, output, largest batch in figures, memory of the card, throughput over the baseline.
SETTINGS = {
    "kitty": ("qwen3-8b", 65, 8127, 256, "80GiB", (2.1, 4.1)),
    "kitty-prefill": ("qwen3-8b", 8192, 100, 32, "80GiB", (0.94, 1.18)),
    "kvmix": ("llama-2-7b", 688, 1024, 30, "24GiB", (5.3, 5.3)),
    "kivi": ("llama-2-7b", 160, 338, 96, "80GiB", (2.35, 3.47)),
    "patternkv": ("llama-3.1-8b", 1024, 256, 160, "96GiB", (1.15, 1.60)),
    "xquant": ("mistral-7b", 1024, 128, 16, "24GiB", None),
    "pm-kvq": ("llama-3.1-8b", 128, 32640, 6, "24GiB", (2.73, 5.18)),
}
# Generated tokens a second by system and batch, wherever any were published; None is out of memory.
RATES = {
    "kitty": {
        "16 bits, static cache": {8: 233, 16: 498, 32: 1000, 64: None},
        "16 bits, dynamic cache": {8: 244, 16: 403, 32: 547, 64: None},
        "HF KIVI, 4 bits": {8: 161, 16: 206, 32: 239, 64: 255},
        "Kitty-Pro": {8: 221, 16: 427, 32: 874, 64: 1467, 96: 1694, 128: 1902, 192: 2104, 256: 2211},
    },
    "kitty-prefill": {
        "16 bits, static cache": {16: 188},
        "16 bits, dynamic cache": {16: 149},
        "Kitty": {16: 176, 32: None},
    },
    "kvmix": {"KVmix": {30: 617}},
}
DRAWN = replace(PRESETS["kivi-2-g32"], name="kvmix-random")  # as long as KVmix's
each_paper = pytest.mark.parametrize("name", PAPERS)


def test_there_is_a_record_of_every_paper() -> None:
    assert list(PAPERS) == list(SETTINGS) and all(name == paper.name for name, paper in PAPERS.items())


@each_paper
def test_settings_are_the_papers(name: str) -> None:
    paper, full = PAPERS[name], PAPERS[name].full
    largest = max(int(size) for size in full.batches.split(",") if size != "max")
    assert (paper.shape, *full[:2], largest, full.memory, paper.throughput) == SETTINGS[name]
    assert name == "kitty-prefill" or full.batches.endswith(",max")


@each_paper
def test_published_rates_are_the_papers(name: str) -> None:
    found: dict[str, dict[int, int | None]] = {}
    for row in PAPERS[name].published:
        if row.output_tok_s is not None or row.note == "out of memory":
            found.setdefault(row.system, {})[row.batch or 0] = row.output_tok_s
    assert found == RATES.get(name, {})


def test_kvmix_counts_prompts() -> None:
    (row,) = (row for row in PAPERS["kvmix"].published if row.output_tok_s)
    assert row.total_tok_s == 1032 == round(617 * (688 + 1024) / 1024)


def test_patternkv_has_no_rates_that_contradict_its_setting() -> None:
    paper = PAPERS["patternkv"]
    assert not any(row.output_tok_s or row.total_tok_s for row in paper.published)
    assert {row.batch: row.ratio for row in paper.published if row.ratio} == {
        None: "1.4x",
        16: "1.15x",
        128: "1.60x",
    }
    assert "769 tokens" in paper.notes[0]


@each_paper
def test_ladders_fit_both_models_and_every_one_steps_down_scaled(name: str) -> None:
    paper = PAPERS[name]
    shortest = paper.scaled.input_len + paper.scaled.output_len - 1
    for shape in (paper.shape, "demo"):
        config = config_from_hf(SHAPES[shape])
        for kv, ladder in kv_ladders(paper.kvs, {"kvmix-random": DRAWN}).items():
            make_ladder(ladder, config, config.dtype)
            assert kv == "bf16" or shortest > ladder.window.least_computed(ladder.sink + BLOCK_TOKENS)


@each_paper
def test_every_paper_runs_scaled_down(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    opened: list[str] = []

    def open_engine(args: object, plan: object, kv: object) -> FakeEngine:
        opened.append(kv.name)  # type: ignore[attr-defined]
        return FakeEngine()

    monkeypatch.setattr(bench, "_open_engine", open_engine)
    output = tmp_path / "rows.json"
    words = ["--preset", name, "--shape", "demo", "--output", str(output), "--plot", str(tmp_path / "x.svg")]
    assert main(["bench", *words]) == 0
    paper, rows = PAPERS[name], json.loads(output.read_text())
    shown = capsys.readouterr().out
    assert opened == paper.kvs.split(",") and {row["kv"] for row in rows} == set(opened)
    assert {(row["preset"], row["model"], row["method"], row["repeats"]) for row in rows} == {(name, "demo", "run", 1)}
    largest = {kv: max(row["batch"] for row in rows if row["kv"] == kv) for kv in opened}
    assert largest["bf16"] == 4 < max(largest.values()), "memory is for 4 requests at 16 bits"
    assert f"{paper.title}, scaled down" in shown and f"--shape {paper.shape}" in shown
    assert paper.hardware in shown and paper.published[-1].system in shown
    assert (tmp_path / "x.svg").read_bytes().startswith(b"<?xml")


def test_the_full_setting_is_for_a_shape_and_options_override_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: FakeEngine())
    words = ["--preset", "kvmix", "--shape", "llama-2-7b", "--kv", "bf16,kvmix-random", "--output-len", "512"]
    assert main(["bench", *words, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["input_len"], row["output_len"], row["model"]) for row in rows} == {(688, 512, "llama-2-7b")}
    wide, narrow = ([row["batch"] for row in rows if row["kv"] == kv] for kv in ("bf16", "kvmix-random"))
    assert (wide, narrow) == ([4, 8, 16, 18, 30], [4, 8, 16, 30, 64]), "sorted, with the largest that fits"
    assert main(["bench", *words, "--kv-memory", "1GiB", "--batch-sweep", "2", "-o", "json"]) == 0
    assert [row["batch"] for row in json.loads(capsys.readouterr().out)] == [2, 2]


def test_markdown_has_two_tables_and_data_has_ours_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: FakeEngine())
    words = ["bench", "--preset", "kitty", "--kv", "bf16,kitty", "--batch-sweep", "1,2"]
    assert main([*words, "-o", "md"]) == 0
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("| --")]) == 2
    assert "Kitty-Pro" in text and "vs best bf16" in text
    assert main([*words, "-o", "csv"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 5 and "Kitty-Pro" not in text


def test_one_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv", "bf16,kivi-2", "--batch-sweep", "max", "--output-len", "16", "--input-len", "500"]
    assert main(["bench", "--preset", "kitty", *words, "--kv-memory", "2x", "-o", "json"]) == 0
    wide, narrow = json.loads(capsys.readouterr().out)
    assert wide["status"] == narrow["status"] == "ok" and narrow["demotions"] > 0
    assert narrow["batch"] > wide["batch"] == 2 and narrow["effective_bits"] < 16 == wide["effective_bits"]


def test_ratios_are_to_the_first_presets_best_batch() -> None:
    rows = [make_row(kv=kv, batch=batch, output_tok_s=rate) for kv, batch, rate in RATES_OF_TWO]
    assert best_ratios(rows) == {"bf16": 1.0, "kitty": 2.5}
    assert best_ratios([make_row(output_tok_s=None), make_row(kv="kitty")]) == {}


RATES_OF_TWO = [("bf16", 1, 50.0), ("bf16", 2, 100.0), ("kitty", 1, 60.0), ("kitty", 9, 250.0)]


@each_paper
def test_pictures_have_no_overlapping_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: saved.append(figure))
    rows = [make_row(kv=kv, batch=b, output_tok_s=r) for kv, b, r in RATES_OF_TWO]
    plot_sweep(rows, experiment=Experiment(PAPERS[name], True))
    (figure,) = saved
    figure.canvas.draw()
    speed, memory, ratios = figure.axes
    boxes = [axes.get_tightbbox() for axes in (speed, memory, ratios)]
    boxes += [figure.legends[0].get_window_extent(), figure._suptitle.get_window_extent()]  # type: ignore[attr-defined]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1) for box in boxes)
    labels = [text.get_text() for text in ratios.texts]
    assert labels[:2] == ["1.00x", "2.50x"] and len(labels) == 2 + (PAPERS[name].throughput is not None)
