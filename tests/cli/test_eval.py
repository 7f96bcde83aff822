"""``eval`` as a command, through the real cache."""

import json
from pathlib import Path

import pytest

from qkv_engine.cli.main import main


def rows_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict]:
    assert main(["eval", *words, "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def test_presets_through_the_real_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    words = ["--kv", "bf16,int4", "--tasks", "ledger:6,addition:2", "--samples", "2", "--kv-memory", "96MiB"]
    rows = rows_of(capsys, *words, "--output", str(file))
    assert [(row["kv"], row["task"], row["size"]) for row in rows] == [
        *(("bf16", "ledger", 6), ("bf16", "addition", 2)),
        *(("int4", "ledger", 6), ("int4", "addition", 2)),
    ]
    assert [row["right"] for row in rows] == [2, 2, 2, 2]
    wide, narrow = rows[0], rows[2]
    assert (wide["effective_bits"], wide["lowest_bits"], wide["demotions"]) == (16, 16, 0)
    assert narrow["effective_bits"] < 16 and narrow["lowest_bits"] == 4 and narrow["demotions"] >= 2
    assert all(row["preemptions"] == row["cut"] == 0 and row["status"] == "ok" for row in rows)
    assert rows[3]["demotions"] == 0  # less than a block; the count of the task before is forgotten
    assert rows[1]["output_tokens"] == rows[3]["output_tokens"] > 0
    assert len(file.read_text().splitlines()) == 5


def test_questions_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "What is 47*86?", "answer": "4042"}\n{"prompt": "What is 1+1?", "answer": "3"}\n')
    (row,) = rows_of(capsys, "--data", str(data), "--kv", "int8", "--kv-memory", "96MiB")
    assert (row["task"], row["size"], row["samples"], row["right"], row["cut"]) == ("mine", None, 2, 1, 0)


def test_what_does_not_fit_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(capsys, "--tasks", "ledger:40", "--kv", "bf16", "--kv-memory", "1000", code=3)
    assert row["status"] == "does not fit" and row["detail"].startswith("--kv-memory=")


@pytest.mark.parametrize(
    "words",
    [
        ["--tasks", "poetry"],
        ["--kv", "bf17"],
        ["--samples", "0"],
        ["--max-tokens", "0"],
        ["--output", "/nowhere/at/all.json"],
        ["--output", "rows.foo"],
        ["--log-samples", "/tmp"],
        ["--log-samples", "samples.csv"],
        ["--data", "/nowhere.jsonl"],
        ["--data", "/dev/zero"],
        ["--task", "sorting", "--tasks", "sorting"],
    ],
)
def test_mistakes_are_found_before_anything_runs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


def test_either_spelling_names_tasks_and_samples_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "samples.jsonl"
    words = ["--task", "sorting:3", "--samples", "2", "--kv", "bf16,int4", "--kv-memory", "96MiB"]
    assert main(["eval", *words, "--log-samples", str(log)]) == 0
    out, err = capsys.readouterr()
    assert "sorting int4: no block was filled" in out
    assert err.splitlines() == [
        "qkv-engine: 1 of 2: bf16, sorting 3",
        "qkv-engine: 2 of 2: int4, sorting 3",
        f"qkv-engine: wrote 4 samples to {log}",
    ]
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(sample["kv"], sample["index"]) for sample in samples] == [
        ("bf16", 0),
        ("bf16", 1),
        ("int4", 0),
        ("int4", 1),
    ]
    assert all(sample["right"] == (sample["answer"] == sample["expected"]) for sample in samples)
    assert all(sample["question"] and sample["reply"].startswith("<think>") for sample in samples)


def test_the_help_explains_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    out = capsys.readouterr().out
    for column in ("95 % interval", "same as", "cut", "lowest", "preemptions"):
        assert f"  {column}" in out
    assert "--tasks" in out and "--task " not in out
