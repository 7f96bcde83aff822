"""Exact-match accuracy through the real quantized cache: every task with every KV preset, one row each.

All requests of a task are handed over at once, so blocks step down as they do in service. Nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qkv_engine.config import KVConfig
from qkv_engine.errors import ConfigError, QKVError
from qkv_engine.presets import PRESETS
from qkv_engine.request import RequestOutput

from .grading import final_answer, grade, is_correct
from .paired import ABOVE, Paired, paired_cell
from .preset_loop import measure_presets
from .provenance import Provenance, block_bits, engine_values, provenance
from .questions import Task, ask
from .report import number, short, unfilled_notes
from .runs import BenchEngine
from .status import FAILED, OK, status_cell, status_notes
from .table import Column, Table, from_rows, joined
from .watch import no_watch, work_of

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.text.tokenizer import Tokenizer

    from .watch import Watch


OpenEngine = Callable[[str], AbstractContextManager[BenchEngine]]


@dataclass(frozen=True, kw_only=True)
class AccuracyPlan:
    """Questions and presets. ``max_tokens`` limit a reply; None is a little more than the right reply has."""

    model: str
    kvs: tuple[str, ...]
    tasks: tuple[Task, ...]
    max_tokens: int | None = None
    seed: int = 0  # that the tasks were drawn with


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Provenance):
    """One task with one KV preset.

    ``low`` and ``high`` are Wilson's 95 % interval of ``accuracy``; ``same`` counts the replies that are, to the
    letter, those of the first preset; ``cut`` those that ran into their token limit. ``better`` and ``worse`` count
    questions that this preset alone, or the one before alone, answered right, and ``p`` is their sign test. Bits count
    all metadata: ``effective_bits`` those held at the peak of KV memory, ``block_bits`` those of a block on the last
    rung; ``lowest_bits`` are the narrowest codes of any request when it ended. ``kv_bytes_total`` is the KV memory in
    bytes. ``status`` is "ok", "does not fit" or "failed"; ``detail`` says why.
    """

    model: str
    task: str
    size: int | None
    kv: str
    samples: int
    right: int | None = None
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    same: int | None = None
    cut: int | None = None
    better: int | None = None
    worse: int | None = None
    p: float | None = None
    kv_bytes_total: int | None = None
    effective_bits: float | None = None
    block_bits: float | None = None
    lowest_bits: float | None = None
    output_tokens: int | None = None
    demotions: int | None = None
    preemptions: int | None = None
    seconds: float | None = None
    status: str
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question with one KV preset: the expected and the given answer.

    ``answer`` is the reply without its chain of thought, which is compared with ``expected``. ``index`` counts the
    questions of a task from 0.
    """

    model: str
    kv: str
    task: str
    size: int | None
    index: int
    question: str
    expected: str
    answer: str
    right: bool
    finish_reason: str | None
    reply: str


Log = Callable[[list[Sample]], None]


def evaluate(
    plan: AccuracyPlan,
    open_engine: OpenEngine,
    *,
    watch: Watch = no_watch,
    log: Log = lambda samples: None,
    describe: Callable[[QKVError], str] = str,
) -> Iterator[AccuracyRow]:
    """Yields a row as soon as it is known; ``watch`` is entered around every task, ``log`` is given its samples.
    ``describe`` words errors.

    Engines and failures are those of ``measure_presets``.
    """
    return _Evaluation(plan, open_engine, watch, log, describe).rows()


@dataclass
class _Evaluation:
    plan: AccuracyPlan
    open_engine: OpenEngine
    watch: Watch
    log: Log
    describe: Callable[[QKVError], str]
    _first_replies: dict[str, list[str]] = field(default_factory=dict)  # by task, of the preset that answered it first
    _last_right: dict[str, list[bool]] = field(default_factory=dict)  # by task, of the preset that answered it last

    def rows(self) -> Iterator[AccuracyRow]:
        tasks = dict.fromkeys(self.plan.kvs, self.plan.tasks)
        return measure_presets(tasks, self.open_engine, self._begin, self._failure, self.describe)

    def _begin(self, kv: str, engine: BenchEngine) -> Callable[[Task], AccuracyRow]:
        if engine.tokenizer is None:
            raise ConfigError("has no tokenizer to ask questions with", field="model", value=self.plan.model)
        return partial(self._task, kv, engine, engine.tokenizer)

    def _task(self, kv: str, engine: BenchEngine, tokenizer: Tokenizer, task: Task) -> AccuracyRow:
        asks = ask(tokenizer, task.examples, max_tokens=self.plan.max_tokens)
        prompts, params = [ask.prompt for ask in asks], [ask.judged for ask in asks]
        engine.reset_stats()
        with self.watch(work_of(f"{kv}, {task.label}", prompts, params), engine):
            start = time.monotonic()
            outputs = engine.generate(prompts, params)
            seconds = time.monotonic() - start
        self.log(self._samples(kv, task, outputs))
        return self._row(kv, task, outputs, engine.stats(), seconds)

    def _row(
        self, kv: str, task: Task, outputs: list[RequestOutput], stats: EngineStats, seconds: float
    ) -> AccuracyRow:
        replies = [output.text for output in outputs]
        found = grade(replies, list(task.examples))
        right = [is_correct(reply, e.answer) for reply, e in zip(replies, task.examples, strict=True)]
        before = self._last_right.get(task.label)
        paired = {} if before is None else Paired.of(right, before)._asdict()
        self._last_right[task.label] = right
        first = self._first_replies.setdefault(task.label, replies)
        errors = [output.error for output in outputs if output.error is not None]
        bits = [output.kv.lowest_bits for output in outputs if output.kv.lowest_bits is not None]
        row = self._failure(kv, task, OK, None)
        return replace(
            row,
            **engine_values(stats, self.plan.seed),
            **paired,
            block_bits=block_bits(stats),
            right=found.correct,
            accuracy=round(found.share, 4),
            low=round(found.low, 4),
            high=round(found.high, 4),
            same=sum(map(str.__eq__, replies, first)),
            cut=sum(output.outputs[0].finish_reason == "length" for output in outputs),
            lowest_bits=min(bits, default=None),
            output_tokens=stats.generation_tokens,
            seconds=round(seconds, 3),
            status=FAILED if errors else OK,
            detail=f"{len(errors)} of {len(outputs)} requests failed, the first: {errors[0]}" if errors else None,
        )

    def _failure(self, kv: str, task: Task, status: str, detail: str | None) -> AccuracyRow:
        names: dict[str, Any] = {"model": self.plan.model, "task": task.name, "size": task.size, "kv": kv}
        names |= provenance(seed=self.plan.seed)
        return AccuracyRow(**names, samples=len(task.examples), status=status, detail=detail)

    def _samples(self, kv: str, task: Task, outputs: list[RequestOutput]) -> list[Sample]:
        return [
            Sample(
                model=self.plan.model,
                kv=kv,
                task=task.name,
                size=task.size,
                index=index,
                question=example.prompt,
                expected=example.answer,
                answer=final_answer(output.text),
                right=is_correct(output.text, example.answer),
                finish_reason=output.outputs[0].finish_reason,
                reply=output.text,
            )
            for index, (example, output) in enumerate(zip(task.examples, outputs, strict=True))
        ]


def accuracy_table(rows: Sequence[AccuracyRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The rows by task, its ``ladders`` below one another; columns with nothing in them are left out."""
    tasks = list(dict.fromkeys((row.task, row.size) for row in rows))
    rows = sorted(rows, key=lambda row: tasks.index((row.task, row.size)))  # stable: presets keep their order
    is_compared = len({row.kv for row in rows}) > 1
    columns: list[Column[AccuracyRow]] = [
        Column("task", lambda row: row.task, is_text=True),
        Column("size", lambda row: number(row.size, 0), spare=14),
        Column("kv", lambda row: row.kv, is_text=True),
        Column("samples", lambda row: number(row.samples, 0), spare=10),
        Column("right", lambda row: number(row.right, 0)),
        Column("accuracy", lambda row: "" if row.accuracy is None else f"{row.accuracy:.1%}"),
        Column("95 % interval", lambda r: "" if r.low is None else f"{100 * r.low:.1f} - {r.high:.1%}", spare=9),
        Column(f"same as {rows[0].kv}", lambda row: number(row.same, 0) if is_compared else "", spare=7),
        Column(ABOVE, lambda row: paired_cell(row.better, row.worse, row.p), spare=8),
        Column("cut", lambda row: number(row.cut or None, 0), spare=6),
        Column("bits a block", lambda row: number(row.block_bits, 2), spare=11),
        Column("bits held", lambda row: number(row.effective_bits, 2), spare=12),
        Column("lowest", lambda row: short(row.lowest_bits), spare=5),
        Column("tokens", lambda row: number(row.output_tokens, 0), spare=1),
        Column("demotions", lambda row: number(row.demotions or None, 0), spare=4),
        Column("preemptions", lambda row: number(row.preemptions or None, 0), spare=3),
        Column("seconds", lambda row: number(row.seconds, 1), spare=2),
        Column("status", status_cell, spare=13, is_text=True),
    ]
    names = [f"{row.task} {row.kv}" for row in rows]
    notes = [*status_notes(rows, names), *unfilled_notes(rows, names, ladders)]
    return from_rows(_title(rows), rows, columns, notes)


def _title(rows: Sequence[AccuracyRow]) -> str:
    ran = next((row for row in rows if row.device), rows[0])
    return joined(ran.model, ran.machine, ran.dtype, "greedy, exact match")
