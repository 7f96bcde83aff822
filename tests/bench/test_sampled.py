"""Decode steps sampled over filled KV memory: rows of the demo model, and what the command says of mistakes."""

import json

import pytest
import torch

from qkv_engine.bench.roofline import count_weights, limit_seconds
from qkv_engine.bench.sampled import FEWEST_TOKENS, POINTS, STEPS, sample_contexts
from qkv_engine.cli.main import main
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES

WORDS = ["--device", "cpu", "--memory", "48MiB", "--input-len", "472", "--output-len", "40"]


def rows(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict]:
    assert main(["bench", *WORDS, *words, "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def test_weights_of_the_shapes() -> None:
    """Bytes resident, and parameters that a step reads."""
    for name, resident, read in (("llama-3.1-8b", 16.06e9, 7.505e9), ("qwen3-8b", 16.38e9, 7.568e9)):
        weights = count_weights(config_from_hf(SHAPES[name]), torch.bfloat16)
        assert weights.nbytes == pytest.approx(resident, rel=1e-3)
        assert weights.multiplied == pytest.approx(read, rel=1e-3)
        assert weights.read_nbytes == pytest.approx(2 * read, rel=1e-3)
        assert limit_seconds(weights, 1, 0) == pytest.approx(3.5e-3, rel=0.02)
        assert limit_seconds(weights, 512, 0) == pytest.approx(9.8e-3, rel=0.02)
        assert limit_seconds(weights, 1, 4.3e9) == pytest.approx(limit_seconds(weights, 1, 0) + 1e-3, rel=1e-3)


def test_sampled_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--sampled", "--kv", "bf16,int4", "--batch-sweep", "2,max,99")
    assert [(row["kv"], row["status"]) for row in found] == [
        *(("bf16", "ok"), ("bf16", "ok"), ("bf16", "does not fit")),
        *(("int4", "ok"), ("int4", "ok"), ("int4", "does not fit")),
    ]
    assert {row["method"] for row in found} == {"sampled"}
    ran = [row for row in found if row["status"] == "ok"]
    assert all(row["output_tok_s"] == pytest.approx(1e3 * row["batch"] / row["tpot_ms"], rel=1e-3) for row in ran)
    assert all(row["ttft_ms"] is row["total_tok_s"] is row["of_limit"] is None for row in ran)
    wide, narrow = ran[1], ran[3]
    assert narrow["batch"] > wide["batch"] == wide["max_running"]
    assert narrow["effective_bits"] < 9 < wide["effective_bits"] == 16
    assert wide["kv_bytes_total"] + wide["weight_bytes"] <= 48 * 2**20
    # The mean request held 512 - 20 tokens when it was timed.
    per_token = wide["kv_bytes_read"] / wide["batch"] / (2 * 2 * 128 * 8 * 2)
    assert per_token == pytest.approx(512 - 20, abs=36)
    assert f"{wide['batch']} requests of 511 tokens" in found[2]["detail"]


def test_a_run_reads_the_same_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv", "int4", "--batch-sweep", "3"]
    (whole,) = rows(capsys, *words, "--repeats", "1", "--warmup", "0")
    (sampled,) = rows(capsys, *words, "--sampled")
    assert (whole["method"], sampled["method"]) == ("run", "sampled")
    assert sampled["kv_bytes_total"] == whole["kv_bytes_total"]
    assert 0 < sampled["kv_bytes_peak"] <= whole["kv_bytes_peak"]
    assert sampled["effective_bits"] == pytest.approx(whole["effective_bits"], rel=0.1)


def test_contexts_are_the_middles_of_equal_parts() -> None:
    assert sample_contexts(400, 600) == ([500, 700, 900], STEPS)
    contexts, steps = sample_contexts(1024, 128)
    assert len(contexts) == 2 < POINTS and steps == STEPS
    assert sample_contexts(7, FEWEST_TOKENS) == ([17], 10)


def test_a_preset_that_fits_nowhere_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    for memory in ("32MiB", "1MiB"):
        words = ["--memory", memory, "--kv", "bf16", "--batch-sweep", "max"]
        for more in ([], ["--sampled"]):
            (row,) = rows(capsys, *words, *more, code=3)
            assert row["status"] == "does not fit"
    assert "--memory='1MiB': the weights alone take" in row["detail"]


@pytest.mark.parametrize(
    "words",
    [
        ["--memory", "lots"],
        ["--memory", ""],
        ["--kv-memory", "1GiB"],
        ["--batch-sweep", "max..2"],
        ["--sampled", "--output-len", "19"],
        ["--sampled", "--repeats", "3"],
        ["--sampled", "--task", "ledger:2"],
    ],
)
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *WORDS, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
