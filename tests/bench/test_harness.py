"""``eval --lm-eval``: a row a metric and preset, and mistakes that are found before a model is loaded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qkv_engine import CapacityError
from qkv_engine.bench import harness
from qkv_engine.bench.harness import HarnessPlan, HarnessRow, Tasks, harness_table, run_harness
from qkv_engine.cli.main import main

from .harness_tasks import write_tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own tasks are thousands, and take seconds to look through."""
    import lm_eval.tasks  # seconds, which whoever only collects the tests does not need

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda **options: manager(**options | {"include_defaults": False})
    )


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--lm-eval", "demo_rol*,demo_generate", "--include-path", str(folder), "--kv-memory", "64MiB"]
    assert main(["eval", *words, "--limit", "1", "--kv", "fp32,kivi-2", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [(row["kv"], row["task"], row["metric"], row["samples"], row["status"]) for row in rows] == [
        ("fp32", "demo_rolling", "bits_per_byte", 1, "ok"),
        ("fp32", "demo_generate", "exact_match", 1, "ok"),
        ("kivi-2", "demo_rolling", "bits_per_byte", 1, "ok"),
        ("kivi-2", "demo_generate", "exact_match", 1, "ok"),
    ]
    assert "1 of 2: fp32" in err
    wide, narrow = rows[0], rows[2]
    assert (wide["lowest_bits"], wide["demotions"], wide["filter"]) == (32, 0, "none")
    assert narrow["lowest_bits"] == 2 and narrow["demotions"] > 0
    assert abs(narrow["value"] / wide["value"] - 1) > 1e-5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lm-eval", "nope"], "unknown task"),
        (["--lm-eval", ","], "names no task"),
        (["--lm-eval", "demo_choice", "--include-path", "/nowhere"], "no such folder"),
        (["--lm-eval", "demo_choice", "--limit", "0"], "must be at least 1"),
        (["--lm-eval", "demo_choice", "--num-fewshot", "-1"], "must be at least 0"),
        (["--lm-eval", "demo_choice", "--data", "x.jsonl"], "cannot be combined with --lm-eval"),
        (["--apply-chat-template"], "needs --lm-eval"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_task_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_tasks(tmp_path)
    (folder / "data.jsonl").write_text("{")
    assert main(["eval", "--lm-eval", "demo_choice", "--include-path", str(folder)]) == 2
    assert "--lm-eval='demo_choice': cannot be loaded" in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert main(["eval", "--lm-eval", "demo_choice"]) == 2
    assert "pip install '.[eval]'" in capsys.readouterr().err


def test_presets_that_fail_are_rows(folder: Path):
    errors: dict[str, Exception] = {"bf16": CapacityError("too small"), "int4": RuntimeError("broken")}

    def open_engine(kv: str) -> Any:
        raise errors[kv]

    plan = HarnessPlan(model="demo", kvs=("bf16", "int4"), tasks=("demo_choice",), include_path=folder)
    rows = list(run_harness(plan, Tasks(plan), open_engine))
    assert [(row.kv, row.status, row.detail) for row in rows] == [
        ("bf16", "does not fit", "too small"),
        ("int4", "failed", "RuntimeError: broken"),
    ]
    assert harness_table(rows).notes == ["bf16 does not fit: too small", "int4 failed: RuntimeError: broken"]


def test_the_table_groups_presets_by_task_and_metric():
    row = partial(HarnessRow, model="demo", status="ok", filter="none", demotions=1)
    rows = [row(task=task, metric="acc", kv=kv, value=0.5) for kv in ("bf16", "int4") for task in ("a", "b")]
    assert [cells[:4] for cells in harness_table(rows).cells] == [
        ["a", "acc", "bf16", "0.5000"],
        ["a", "acc", "int4", "0.5000"],
        ["b", "acc", "bf16", "0.5000"],
        ["b", "acc", "int4", "0.5000"],
    ]
