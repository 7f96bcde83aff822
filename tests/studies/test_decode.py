"""Decode throughput at a context: rows of a tiny model, sampled and in full, and what the command says of mistakes."""

import json
from pathlib import Path

import pytest
import torch

from qkv_engine.models.config import ModelConfig
from qkv_engine.models.shapes import SHAPES
from studies.decode import decode_table, main, make_plan, parse_args, with_ratios
from studies.decode_run import FULL, SAMPLED, DecodeRow, sample_contexts
from studies.roofline import bytes_seconds, count_weights, limit_seconds

WORDS = ["--shape", "demo", "--device", "cpu", "--memory", "48MiB", "--context", "512", "--steps", "6"]


def rows(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict]:
    assert main([*WORDS, "--output-len", "40", *words, "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def test_weights_of_the_shapes() -> None:
    """Bytes resident, and parameters that a step reads."""
    for name, resident, read in (("llama-3.1-8b", 16.06e9, 7.505e9), ("qwen3-8b", 16.38e9, 7.568e9)):
        weights = count_weights(ModelConfig.from_hf(SHAPES[name]), torch.bfloat16)
        assert weights.nbytes == pytest.approx(resident, rel=1e-3)
        assert weights.multiplied == pytest.approx(read, rel=1e-3)
        assert weights.read_nbytes == pytest.approx(2 * read, rel=1e-3)
        assert bytes_seconds(weights, 0) == pytest.approx(3.5e-3, rel=0.02)
        assert limit_seconds(weights, 512, 0) == pytest.approx(9.8e-3, rel=0.02)
        assert limit_seconds(weights, 1, 4.3e9) == pytest.approx(bytes_seconds(weights, 0) + 1e-3, rel=1e-3)


def test_sampled_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--kv", "bf16,int4", "--batch", "2,max,99")
    assert [(row["kv"], row["status"]) for row in found] == [
        *(("bf16", "does not fit"), ("bf16", "ok"), ("bf16", "ok")),
        *(("int4", "does not fit"), ("int4", "ok"), ("int4", "ok")),
    ]
    ran = [row for row in found if row["status"] == "ok"]
    assert all((row["method"], row["points"], row["steps"]) == (SAMPLED, 1, 6) for row in ran)
    assert all(row["output_tok_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"], rel=1e-3) for row in ran)
    wide, narrow = ran[1], ran[3]
    assert narrow["batch"] > wide["batch"] and narrow["effective_bits"] < 9 < wide["effective_bits"] == 16
    assert wide["kv_bytes_total"] + wide["weight_bytes"] <= 48 * 2**20
    # The mean request held 512 - 20 tokens when it was timed.
    per_token = wide["kv_bytes_read"] / wide["batch"] / (2 * 2 * 128 * 8 * 2)
    assert per_token == pytest.approx(512 - 20, abs=36)
    assert max(row["vs_best"] for row in ran[:2]) == 1


def test_points_lie_in_the_middles_of_equal_parts() -> None:
    words = ["--shape", "demo", "--device", "cpu", "--context", "1000", "--output-len", "600", "--points", "3"]
    assert sample_contexts(1000, make_plan(parse_args([*words, "--steps", "9"]))) == [500, 700, 900]


def test_a_full_run_measures_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    full, sampled = (rows(capsys, "--kv", "int4", "--batch", "3", *more)[0] for more in (["--full"], []))
    assert (full["method"], sampled["method"]) == (FULL, SAMPLED)
    assert full["status"] == "ok" and 20 < full["steps"] < 40
    assert full["kv_bytes_read"] == pytest.approx(sampled["kv_bytes_read"], rel=0.15)


def test_rows_are_saved_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, output = tmp_path / "speed.png", tmp_path / "rows.jsonl"
    words = ["--context", "512,300", "--kv", "bf16", "--batch", "1,2", "--plot", str(plot), "--output", str(output)]
    assert len(rows(capsys, *words)) == len(output.read_text().splitlines()) == 4
    assert all((tmp_path / f"speed-{c}.png").read_bytes().startswith(b"\x89PNG") for c in (512, 300))


def test_the_table_leaves_empty_columns_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--output-len", "40", "--kv", "bf16", "--batch", "1"]) == 0
    out, err = capsys.readouterr()
    assert "roofline" not in out and "vs best bf16" in out and "sampled" in out
    assert err.count("tok/s") == 1


def test_a_preset_that_fits_nowhere_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--memory", "25MiB", "--kv", "bf16")
    assert [row["status"] for row in found] == ["does not fit"]


@pytest.mark.parametrize(
    "words",
    [
        ["--kv", "bf17"],
        ["--batch", "many"],
        ["--context", "0"],
        ["--output-len", "512"],
        ["--output-len", "20", "--steps", "40"],
        ["--memory", "lots"],
    ],
)
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


def test_ratios_are_to_the_first_presets_best_row(capsys: pytest.CaptureFixture[str]) -> None:
    def row(kv: str, batch: int, rate: float | None) -> DecodeRow:
        sizes = {"input_len": 1, "output_len": 1, "context": 2}
        return DecodeRow(model="m", kv=kv, batch=batch, output_tok_s=rate, status="ok", method=SAMPLED, **sizes)

    found = with_ratios([row("bf16", 1, 50.0), row("bf16", 2, 100.0), row("int4", 9, 320.0), row("x", 1, None)])
    assert [r.vs_best for r in found] == [0.5, 1.0, 3.2, None]
    assert "3.20x" in decode_table(found).cells[2]
