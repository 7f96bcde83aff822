"""Answers beside speed: the engine of each preset of a sweep answers questions once its sizes are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, cast

from qkv_engine.config import KVConfig
from qkv_engine.errors import QKVError
from qkv_engine.presets import PRESETS

from .accuracy import AccuracyPlan, AccuracyRow, evaluate
from .grading import mean_interval
from .papers import Experiment
from .report import paper_tables, sweep_table, workload_table
from .runs import BenchEngine
from .status import FAILURES, OK, cause
from .sweep import OpenEngine, SweepRow
from .table import Table
from .watch import Watch, Watched, Work, no_watch

if TYPE_CHECKING:
    from .filled import FilledEngine

DENSE_BITS = 16  # of a KV element before any block has stepped down


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The answers of one preset.

    ``accuracy`` is the mean of the tasks' shares of right answers, 0 to 1; ``accuracy_low`` and ``accuracy_high`` are
    its 95 % interval, over ``answers`` in all. ``eval_tasks`` names the tasks and ``eval_model`` the model that
    answered. ``eval_bits`` are effective bits when the most KV was held, mean of the tasks. Of a preset without
    answers ``eval_detail`` says why.
    """

    eval_model: str | None = None
    eval_tasks: str | None = None
    answers: int | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    eval_bits: float | None = None
    eval_detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class RatedRow(Quality, SweepRow):
    """A row of a sweep with the answers of its preset, which are the same in all its rows."""


OpenOther = Callable[[], AbstractContextManager[BenchEngine]]


@dataclass
class Answering:
    """Opens the engines of a sweep and has each preset asked the tasks of ``plan``, if there are any.

    The sweep's engine answers when it is done with its sizes; for a preset in ``others`` an engine of its own does,
    opened once the first is closed. ``found`` has the answers by preset, and ``on_found`` is called for each.
    """

    plan: AccuracyPlan
    open_engine: OpenEngine
    others: Mapping[str, OpenOther] = field(default_factory=dict)
    found: dict[str, Quality] = field(default_factory=dict)
    watch: Watch = no_watch
    describe: Callable[[QKVError], str] = str
    on_found: Callable[[], None] = lambda: None

    @contextmanager
    def open(self, kv: str) -> Iterator[BenchEngine | FilledEngine]:
        """The engine of ``kv`` for a sweep. Questions are asked when the sweep leaves it without an error."""
        with self.open_engine(kv) as engine:
            yield engine
            if kv not in self.others:
                self._ask(kv, lambda _: nullcontext(cast("BenchEngine", engine)))
        if kv in self.others:
            self._ask(kv, lambda _: self.others[kv]())

    def _ask(self, kv: str, open_engine: Callable[[str], AbstractContextManager[BenchEngine]]) -> None:
        is_answered = kv in self.found and self.found[kv].accuracy is not None  # by an engine that failed later
        if not self.plan.tasks or is_answered:
            return
        plan = replace(self.plan, kvs=(kv,))
        try:
            rows = list(evaluate(plan, open_engine, watch=self._watch_task, describe=self.describe))
            self.found[kv] = quality_of(rows)
        except FAILURES as error:  # such as a plan for another model than the one asked
            self.found[kv] = Quality(eval_detail=cause(error, self.describe))
        self.on_found()

    def _watch_task(self, work: Work, engine: Watched) -> AbstractContextManager[None]:
        """All tasks of a preset are one row of progress."""
        return self.watch(work._replace(share=1 / len(self.plan.tasks)), engine)


def quality_of(rows: Sequence[AccuracyRow]) -> Quality:
    """The answers of one preset to all tasks; none if one of the tasks failed."""
    named = Quality(eval_model=rows[0].model, eval_tasks=", ".join(f"{row.task} {row.size}" for row in rows))
    failed = next((row for row in rows if row.status != OK), None)
    if failed is not None:
        return replace(named, eval_detail=f"{failed.task} {failed.status}: {failed.detail}")
    low, high = mean_interval([(row.right or 0, row.samples) for row in rows])
    return replace(
        named,
        answers=sum(row.samples for row in rows),
        accuracy=round(fmean((row.right or 0) / row.samples for row in rows), 4),
        accuracy_low=round(low, 4),
        accuracy_high=round(high, 4),
        eval_bits=round(fmean(row.effective_bits or 0 for row in rows), 3),
    )


def rate(rows: Sequence[SweepRow], found: Mapping[str, Quality]) -> list[RatedRow]:
    """``rows`` with the answers ``found`` of their presets; without them where a preset was not asked yet."""
    return [RatedRow(**vars(row), **vars(found.get(row.kv, Quality()))) for row in rows]


def at_floor(kv: KVConfig) -> KVConfig:
    """``kv`` with every block on its last rung as soon as it may be there."""
    return replace(kv, eager=True) if len(kv.rungs) > 1 else kv


def sweep_tables(rows: Sequence[RatedRow], ladders: Mapping[str, KVConfig] = PRESETS) -> list[Table]:
    """The tables of a sweep of ``ladders``: speed or questions, with the answers, and a paper's published rows."""
    table = (sweep_table if rows[0].task is None else workload_table)(rows, ladders)
    ours = with_answers(table, rows, ladders)
    experiment = Experiment.of(rows[0].preset, rows[0].model)
    return [ours] if experiment is None else list(paper_tables(ours, experiment))


def with_answers(table: Table, rows: Sequence[RatedRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """``table`` of ``rows`` of ``ladders`` with their accuracy, if any of them was asked."""
    notes = [*table.notes, *answer_notes(rows, ladders)]
    asked = next((row for row in rows if row.accuracy is not None), None)
    if asked is None:
        return table._replace(notes=notes)
    at = len(table.headers) - (table.headers[-1] == "status")
    columns = {right_header(asked): [accuracy_cell(row) for row in rows], "95 %": [interval_cell(row) for row in rows]}
    cells = [
        [*row[:at], *found, *row[at:]]
        for row, found in zip(table.cells, zip(*columns.values(), strict=True), strict=True)
    ]
    return table._replace(
        title=f"{table.title} · {right_title(asked)}",
        headers=[*table.headers[:at], *columns, *table.headers[at:]],
        cells=cells,
        notes=notes,
        spare=["95 %", *table.spare],
    )


def right_header(row: RatedRow) -> str:
    """The header of the accuracy column; it names the model where another one answered than was measured."""
    return "right" if row.eval_model == row.model else f"right, {row.eval_model} model"


def right_title(row: RatedRow) -> str:
    """The tasks as a part of a title: "right: mean of ledger 40, lookup 100, 48 answers"."""
    return f"{right_header(row)}: mean of {row.eval_tasks}, {row.answers:,} answers"


def accuracy_cell(row: RatedRow) -> str:
    return "" if row.accuracy is None else f"{row.accuracy:.1%}"


def interval_cell(row: RatedRow) -> str:
    if row.accuracy_low is None or row.accuracy_high is None:
        return ""
    return f"{100 * row.accuracy_low:.1f} - {100 * row.accuracy_high:.1f}"


def answer_notes(rows: Sequence[RatedRow], ladders: Mapping[str, KVConfig] = PRESETS) -> list[str]:
    """Notes on the answers of ``ladders``: presets without any, and the precision of the others under the questions."""
    by_kv = {row.kv: row for row in rows}
    notes = [f"{kv} without answers: {row.eval_detail}" for kv, row in by_kv.items() if row.eval_detail]
    asked = {kv: row for kv, row in by_kv.items() if row.accuracy is not None and kv in ladders}
    steps = {kv: row for kv, row in asked.items() if len(ladders[kv].rungs) > 1}
    reasons = {
        "answers with all blocks on the floor, as when memory is full": [
            kv for kv in steps if ladders[kv] != at_floor(ladders[kv])
        ],
        "no block stepped down under the questions, which are too short: answers of 16 bits": [
            kv for kv, row in steps.items() if row.eval_bits == DENSE_BITS
        ],
    }
    return notes + [f"{', '.join(kvs)}: {reason}" for reason, kvs in reasons.items() if kvs]
