"""Answers beside speed: who is asked and when, what a row says of it, and the column of the table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkv_engine.bench.accuracy import AccuracyPlan
from qkv_engine.bench.grading import wilson_interval
from qkv_engine.bench.quality import Answering, Quality, at_floor, rate, with_answers
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.bench.report import sweep_table
from qkv_engine.bench.sweep import SweepPlan, SweepRow, sweep
from qkv_engine.bench.table import as_text
from qkv_engine.cli import bench
from qkv_engine.cli.bench import quality
from qkv_engine.cli.main import main
from qkv_engine.config import KVConfig
from qkv_engine.errors import CapacityError, ConfigError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.loading import demo_folder
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.plan_file import plan_bytes
from qkv_engine.planner.mixed import Mixed
from qkv_engine.planner.plan import KVPlan
from qkv_engine.presets import PRESETS

from ..planner.profiles import made_up_profile
from .answering import AnsweringEngine
from .fake import make_row

TASKS = parse_tasks("addition:3,lookup:4", samples=4)


def answering(log: list[str], kvs: tuple[str, ...], others: tuple[str, ...] = (), **engine: Any) -> Answering:
    def open_as(name: str) -> Callable[[], AnsweringEngine]:
        return lambda: AnsweringEngine(name=name, log=log, tasks=TASKS, **engine)

    plan = AccuracyPlan(model="demo", kvs=kvs, tasks=TASKS)
    return Answering(plan, lambda kv: open_as(kv)(), {kv: open_as(f"{kv} floor") for kv in others})


def sweep_rows(answers: Answering, **values: Any) -> list[SweepRow]:
    plan = {"model": "demo", "batches": (1, 2), "input_len": 4, "output_len": 3, "repeats": 1, "warmup": 0} | values
    return list(sweep(SweepPlan(kvs=answers.plan.kvs, **plan), answers.open))


def test_the_engine_that_was_measured_answers_before_it_is_closed() -> None:
    log: list[str] = []
    sweep_rows(answering(log, ("bf16", "int4")))
    one = ["measured", "measured", "asked", "asked", "closed"]
    assert log == [f"{kv} {event}" for kv in ("bf16", "int4") for event in one]


def test_another_engine_answers_once_the_first_is_closed() -> None:
    log: list[str] = []
    sweep_rows(answering(log, ("auto",), ("auto",)), batches=(1,))
    assert log == ["auto measured", "auto closed", "auto floor asked", "auto floor asked", "auto floor closed"]


def test_every_row_of_a_preset_has_its_answers() -> None:
    answers = answering([], ("bf16",), wrong=1)
    rows = rate(sweep_rows(answers), answers.found)
    low, high = wilson_interval(6, 8)
    for row in rows:
        assert (row.eval_model, row.eval_tasks, row.answers) == ("demo", "addition 3, lookup 4", 8)
        assert (row.accuracy, row.accuracy_low, row.accuracy_high) == (0.75, round(low, 4), round(high, 4))
    assert [row.batch for row in rows] == [1, 2]


def test_a_sweep_without_tasks_asks_nothing() -> None:
    log: list[str] = []
    answers = answering(log, ("auto",), ("auto",))
    answers.plan = AccuracyPlan(model="demo", kvs=("auto",), tasks=())
    rows = sweep_rows(answers)
    assert log == ["auto measured", "auto measured", "auto closed"]
    assert [row.accuracy for row in rate(rows, answers.found)] == [None, None]


def test_who_interrupts_a_sweep_is_not_asked() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sweep_rows(answering(log, ("bf16",), raises={2: KeyboardInterrupt()}))
    assert log == ["bf16 measured", "bf16 measured", "bf16 closed"]


@pytest.mark.parametrize(
    "error", [ConfigError("another model"), CapacityError("another model"), RuntimeError("another model")]
)
def test_a_preset_that_cannot_answer_keeps_its_rows_and_says_why(error: Exception) -> None:
    answers = answering([], ("bf16",))

    def refuse() -> AnsweringEngine:
        raise error

    answers.others = {"bf16": refuse}
    rows = rate(sweep_rows(answers), answers.found)
    assert [row.status for row in rows] == ["ok", "ok"] and rows[0].accuracy is None
    assert "another model" in (rows[0].eval_detail or "")
    assert "bf16 without answers: " in as_text(with_answers(sweep_table(rows), rows))


def test_a_failed_size_is_followed_by_one_round_of_questions() -> None:
    log: list[str] = []
    answers = answering(log, ("bf16",), raises={1: RuntimeError("out of memory")})
    assert [row.status for row in sweep_rows(answers)] == ["failed", "ok"]
    assert log.count("bf16 asked") == len(TASKS) and answers.found["bf16"].accuracy == 1


def test_an_engine_opened_anew_is_asked_where_the_one_in_doubt_could_not_answer() -> None:
    answers = answering([], ("bf16",))
    engines: list[AnsweringEngine] = []

    def open_engine(kv: str) -> AnsweringEngine:
        doubt = {} if engines else {1: RuntimeError("out of memory"), 4: RuntimeError("in doubt")}
        engines.append(AnsweringEngine(tasks=TASKS, raises=doubt))
        return engines[-1]

    answers.open_engine = open_engine
    assert [row.status for row in sweep_rows(answers)] == ["failed", "ok"]
    assert len(engines) == 2 and answers.found["bf16"].accuracy == 1


def rated(kv: str, **values: Any) -> Any:
    quality = {"eval_model": "demo", "eval_tasks": "lookup 4", "answers": 8, "accuracy": 0.75} | values
    found = Quality(**{"accuracy_low": 0.4, "accuracy_high": 0.93, "eval_bits": 5.0} | quality)
    return rate([make_row(kv=kv)], {kv: found})[0]


def test_the_column_stands_before_the_status() -> None:
    rows = [rated("bf16"), rate([make_row(kv="int4", status="failed", detail="x")], {})[0]]
    table = with_answers(sweep_table(rows), rows)
    assert table.headers[-3:] == ["right", "95 %", "status"]
    assert [row[-3:] for row in table.cells] == [["75.0%", "40.0 - 93.0", ""], ["", "", "failed"]]
    assert table.title.endswith("right: mean of lookup 4, 8 answers")


def test_the_column_names_the_model_that_answered_for_random_weights() -> None:
    (row,) = rate([make_row(model="qwen3-8b")], {"bf16": Quality(eval_model="demo", accuracy=1.0, answers=8)})
    table = with_answers(sweep_table([row]), [row])
    assert "right, demo model" in table.headers and "right, demo model: " in table.title


def test_a_table_without_answers_is_as_it_was() -> None:
    rows = rate([make_row()], {})
    assert with_answers(sweep_table(rows), rows) == sweep_table(rows)


def test_notes_name_the_precision_of_the_answers() -> None:
    rows = [rated("bf16", eval_bits=16), rated("auto"), rated("kivi-2", eval_bits=16), rated("int4")]
    notes = with_answers(sweep_table(rows), rows).notes
    assert "auto: answers with all blocks on the floor, as when memory is full" in notes
    assert [note.partition(":")[0] for note in notes if "answers of 16 bits" in note] == ["kivi-2"]


def test_only_ladders_under_pressure_change_at_their_floor() -> None:
    changed = [name for name, kv in PRESETS.items() if at_floor(kv) != kv]
    assert changed == ["pm-kvq-4", "pm-kvq-2", "auto", "auto-2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eval", "lokup:4"], "--eval='lokup:4': not a task. Did you mean lookup?"),
        (["--eval", "lookup", "--samples", "0"], "--samples=0: must be at least 1"),
        (["--eval", "lookup:2", "{empty}"], "has no tokenizer.json"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    from qkv_engine.loading import demo_folder

    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: pytest.fail("ran"))
    (tmp_path / "config.json").write_bytes((demo_folder() / "config.json").read_bytes())
    assert main(["bench", *(word.replace("{empty}", str(tmp_path)) for word in words)]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


def test_with_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input-len", "8", "--output-len", "2", "--repeats", "1", "--warmup", "0", "--batch-sweep", "2"]
    words += ["--kv", "bf16,auto", "--eval", "lookup:20", "--samples", "2", "-o", "json"]
    assert main(["bench", *words]) == 0
    wide, auto = json.loads(capsys.readouterr().out)
    assert wide["accuracy"] == auto["accuracy"] == 1 and wide["answers"] == auto["answers"] == 2
    assert wide["eval_bits"] == 16 > auto["eval_bits"]  # memory was ample, the floor was asked
    assert (auto["demotions"], auto["eval_tasks"], auto["eval_model"]) == (0, "lookup 20", "demo")


def test_the_demo_model_answers_for_random_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: AnsweringEngine())
    words = ["--shape", "qwen3-8b", "--kv", "kivi-2", "--eval", "addition:2", "--samples", "1"]
    assert main(["bench", *words]) == 0
    assert "right, demo model" in capsys.readouterr().out.splitlines()[0]


def write_plan(path: Path, shape: str, weights: str | None) -> str:
    """A made-up plan of a shape or the demo model."""
    model = ModelFingerprint.of(shape, config_from_hf(SHAPES[shape]), weights)
    settings = Mixed(budget="4bits", context=2**20)
    path.write_bytes(plan_bytes(KVPlan.make(settings, made_up_profile(model), model)))
    return str(path)


def test_the_demo_model_answers_with_plans_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    theirs = write_plan(tmp_path / "shape.json", "qwen3-0.6b", None)
    own = write_plan(tmp_path / "own.json", "demo", weights_digest(demo_folder()))
    monkeypatch.setattr(bench, "_open_engine", lambda args, plan, kv: AnsweringEngine())
    asked, tasks = list[KVConfig](), parse_tasks("addition:2", samples=1)
    monkeypatch.setattr(quality, "_open_demo", lambda args, _, kv: asked.append(kv) or AnsweringEngine(tasks=tasks))
    words = ["bench", "--shape", "qwen3-0.6b", "--kv", f"bf16,{theirs}", "--eval", "addition:2", "--samples", "1"]
    assert main([*words, "--eval-plans", own]) == 0
    assert [kv.name for kv in asked] == ["bf16", "own"] and asked[1].model.name == "demo"
    out, _ = capsys.readouterr()
    assert "shape" in out and "own" not in out
    for wrong, said in (([*words, "--eval-plans", f"{own},int4"], "2 for the 1 plans of --kv. Give one for each"),
                        (["bench", "--eval", "addition:2", "--eval-plans", own], "the model answers itself"),
                        (["bench", "--eval-plans", own], "eval")):  # fmt: skip
        assert main(wrong) == 2 and said in capsys.readouterr().err


def test_memory_for_less_than_a_question_is_told_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv", "bf16", "--kv-memory", "1x", "--input-len", "8", "--output-len", "2", "--eval", "ledger:40"]
    assert main(["bench", *words, "--samples", "1"]) == 3
    assert "--eval (tokens of a question)=1195: KV memory of 1.0 MiB holds 128 tokens" in capsys.readouterr().out
