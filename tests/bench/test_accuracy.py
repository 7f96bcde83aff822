"""Evaluation over an engine that answers as told: rows, intervals, failures; the forms of output parse back."""

import csv
import io
import json
from dataclasses import asdict, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from qkv_engine import CapacityError, ConfigError, Engine
from qkv_engine.bench.accuracy import AccuracyPlan, AccuracyRow, Sample, accuracy_table, evaluate
from qkv_engine.bench.grading import wilson_interval
from qkv_engine.bench.provenance import cpu_name
from qkv_engine.bench.questions import parse_tasks
from qkv_engine.bench.report import render
from qkv_engine.request import CompletionOutput, KVUsage, RequestMetrics, RequestOutput, SamplingParams

TASKS = parse_tasks("addition:3,lookup:4", samples=4)


@dataclass
class Oracle:
    """Knows every reply, and gives a wrong one to the first ``wrong`` of each task; ``raises`` by run."""

    tokenizer: Any
    wrong: int = 0
    errors: int = 0
    raises: list[BaseException | None] = field(default_factory=list)
    closed: int = 0

    def __enter__(self) -> "Oracle":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed += 1

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        error = self.raises.pop(0) if self.raises else None
        if error is not None:
            raise error
        known = {tuple(self.tokenizer.encode(e.chat)): e.reply for task in TASKS for e in task.examples}
        outputs = []
        for i, prompt in enumerate(prompts):
            text = "<think>no" if i < self.wrong else known[tuple(prompt)].removesuffix("<|im_end|>")
            reason = "error" if i < self.errors else "length" if i < self.wrong else "stop"
            output = RequestOutput(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=prompt,
                outputs=[CompletionOutput(index=0, text=text, finish_reason=reason)],
                finished=True,
                metrics=RequestMetrics(),
                kv=KVUsage({"int4": 2}, 8 if i else 4),
                error="not finite" if i < self.errors else None,
            )
            outputs.append(output)
        return outputs

    def reset_stats(self) -> None: ...

    def stats(self) -> Any:
        counts = {"generation_tokens": 40, "num_demotions": 3, "num_preemptions": 1, "effective_bits": 5.5}
        rungs = {"dense16": 16.0, "int4": 4.28}
        return SimpleNamespace(
            device="cpu", dtype="float32", num_threads=1, kv_bytes_total=2**20, kv_rungs=rungs, **counts
        )


def plan(**values: Any) -> AccuracyPlan:
    return AccuracyPlan(**{"model": "demo", "kvs": ("bf16", "int4"), "tasks": TASKS} | values)


def rows_of(oracles: dict[str, Oracle], **values: Any) -> list[AccuracyRow]:
    return list(evaluate(plan(**values), lambda kv: oracles[kv]))


def test_figures_are_exact(demo_engine: Engine) -> None:
    oracles = {"bf16": Oracle(demo_engine.tokenizer), "int4": Oracle(demo_engine.tokenizer, wrong=1)}
    rows = rows_of(oracles)
    assert [(row.kv, row.task, row.size, row.samples, row.right, row.same, row.cut) for row in rows] == [
        ("bf16", "addition", 3, 4, 4, 4, 0),
        ("bf16", "lookup", 4, 4, 4, 4, 0),
        ("int4", "addition", 3, 4, 3, 3, 1),
        ("int4", "lookup", 4, 4, 3, 3, 1),
    ]
    row = rows[2]
    assert (row.accuracy, row.low, row.high) == (0.75, *(round(share, 4) for share in wilson_interval(3, 4)))
    assert (row.effective_bits, row.block_bits, row.lowest_bits, row.output_tokens) == (5.5, 4.28, 4, 40)
    assert [(one.better, one.worse, one.p) for one in rows] == [(None, None, None)] * 2 + [(0, 1, 1.0)] * 2
    assert (row.demotions, row.preemptions, row.status, row.detail) == (3, 1, "ok", None)
    assert all(oracle.closed == 1 for oracle in oracles.values())
    assert (row.kv_bytes_total, row.seed, row.device_name) == (2**20, 0, cpu_name())


def test_samples_are_logged_with_what_was_said(demo_engine: Engine) -> None:
    samples: list[Sample] = []
    oracles = {"bf16": Oracle(demo_engine.tokenizer), "int4": Oracle(demo_engine.tokenizer, wrong=1)}
    list(evaluate(plan(), lambda kv: oracles[kv], log=samples.extend))
    assert [(s.kv, s.task, s.index) for s in samples] == [
        (kv, task, index) for kv in ("bf16", "int4") for task in ("addition", "lookup") for index in range(4)
    ]
    assert [s.right for s in samples] == [True] * 8 + [False, True, True, True] * 2
    wrong, right = samples[8], samples[9]
    example = TASKS[0].examples[0]
    assert (wrong.question, wrong.expected, wrong.answer) == (example.prompt, example.answer, "")
    assert (wrong.reply, wrong.finish_reason) == ("<think>no", "length")
    assert right.answer == right.expected and right.reply.endswith(right.answer) and "<think>" in right.reply


def test_a_preset_that_never_stepped_down_is_named_with_its_task(demo_engine: Engine) -> None:
    rows = rows_of({"int4": Oracle(demo_engine.tokenizer)}, kvs=("int4",))
    rows = [rows[0], replace(rows[1], demotions=0)]
    (note,) = accuracy_table(rows).notes
    assert note.startswith("lookup int4: no block was filled, which takes 160 tokens")


def test_a_task_that_fails_is_a_row_and_the_next_has_a_new_engine(demo_engine: Engine) -> None:
    oracle = Oracle(demo_engine.tokenizer, raises=[RuntimeError("broken")])
    rows = rows_of({"int4": oracle}, kvs=("int4",))
    assert [(row.status, row.right) for row in rows] == [("failed", None), ("ok", 4)]
    assert "broken" in rows[0].detail and oracle.closed == 2


def test_what_does_not_fit_is_a_row(demo_engine: Engine) -> None:
    oracle = Oracle(demo_engine.tokenizer, raises=[CapacityError("too long"), None])
    assert [row.status for row in rows_of({"int4": oracle}, kvs=("int4",))] == ["does not fit", "ok"]
    assert oracle.closed == 1


def test_requests_that_fail_make_their_row_fail_and_harm_no_other(demo_engine: Engine) -> None:
    oracle = Oracle(demo_engine.tokenizer, wrong=2, errors=2)
    rows = rows_of({"int4": oracle}, kvs=("int4",))
    assert [(row.status, row.right) for row in rows] == [("failed", 2)] * 2
    assert rows[0].detail == "2 of 4 requests failed, the first: not finite" and oracle.closed == 1


def test_a_model_without_tokenizer_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        rows_of({"bf16": Oracle(None)}, kvs=("bf16",))


def test_forms_of_output_parse_back(demo_engine: Engine) -> None:
    oracles = {
        "bf16": Oracle(demo_engine.tokenizer),
        "int4": Oracle(demo_engine.tokenizer, wrong=1, raises=[None, ValueError("no"), RuntimeError("x | y")]),
    }
    with pytest.raises(ValueError, match="no"):
        rows_of(oracles)
    oracles["int4"].raises = [None, RuntimeError("x | y")]
    rows = rows_of(oracles)
    table = accuracy_table(rows)
    expected = [asdict(row) for row in rows]
    assert json.loads(render("json", rows, table)) == expected
    assert [json.loads(line) for line in render("jsonl", rows, table).splitlines()] == expected
    parsed = list(csv.DictReader(io.StringIO(render("csv", rows, table))))
    assert list(parsed[0]) == [item.name for item in fields(AccuracyRow)]
    assert [row["accuracy"] for row in parsed] == ["1.0", "1.0", "0.75", ""]
    assert [cells[:3] for cells in table.cells] == [
        *(["addition", "3", "bf16"], ["addition", "3", "int4"]),
        *(["lookup", "4", "bf16"], ["lookup", "4", "int4"]),
    ]
    assert "75.0%" in render("table", rows, table)
    assert "lookup int4 failed: RuntimeError: x" in render("md", rows, table)
