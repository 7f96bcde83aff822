"""Exact-match accuracy through the real quantized cache: every task with every KV preset, one row each.

All requests of a task are handed over at once, so blocks step down as they do in service. Nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError
from qkv_engine.request import RequestOutput, SamplingParams

from .grading import score
from .questions import Task, ask
from .report import Table, number
from .sweep import FAILED, NO_FIT, OK

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.tokenizer import Tokenizer


class EvalEngine(AbstractContextManager["EvalEngine"], Protocol):
    """What an evaluation needs of ``Engine``."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def reset_stats(self) -> None: ...


OpenEngine = Callable[[str], EvalEngine]
Watch = Callable[[str, Task, EvalEngine], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class AccuracyPlan:
    """What to ask, of which presets. ``max_tokens`` of a reply; None: a little more than the right one has."""

    model: str
    kvs: tuple[str, ...]
    tasks: tuple[Task, ...]
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """One task with one KV preset.

    ``low`` and ``high`` are Wilson's 95 % interval of ``accuracy``; ``same`` counts the replies that are, to the
    letter, those of the first preset; ``cut`` those that ran into their token limit. ``effective_bits`` are at the
    peak of KV memory, all metadata counted; ``lowest_bits`` the narrowest codes of any request when it ended.
    ``status`` is "ok", "does not fit" or "failed"; ``detail`` says why.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
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
    effective_bits: float | None = None
    lowest_bits: float | None = None
    output_tokens: int | None = None
    demotions: int | None = None
    preemptions: int | None = None
    seconds: float | None = None
    status: str
    detail: str | None = None


def evaluate(
    plan: AccuracyPlan,
    open_engine: OpenEngine,
    *,
    watch: Watch = lambda kv, task, engine: nullcontext(),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[AccuracyRow]:
    """Yields a row as soon as it is known; ``watch`` is entered around every task.

    One engine a preset, opened by ``open_engine`` and closed before the next. Raises ``ConfigError`` and
    ``ModelError``, which no other task would cure; every other failure is a row.
    """
    return _Evaluation(plan, open_engine, watch, clock).rows()


class _Evaluation:
    def __init__(self, plan: AccuracyPlan, open_engine: OpenEngine, watch: Watch, clock: Callable[[], float]):
        self.plan, self.open_engine, self.watch, self.clock = plan, open_engine, watch, clock
        self._first_replies: dict[str, list[str]] = {}  # by task, of the preset that answered it first

    def rows(self) -> Iterator[AccuracyRow]:
        for kv in self.plan.kvs:
            tasks = list(self.plan.tasks)
            while tasks:
                try:
                    with self.open_engine(kv) as engine:
                        yield from self._tasks(kv, tasks, engine)
                except CapacityError as error:
                    yield from (self._failure(kv, task, NO_FIT, str(error)) for task in tasks)
                    break

    def _tasks(self, kv: str, tasks: list[Task], engine: EvalEngine) -> Iterator[AccuracyRow]:
        """Takes tasks off ``tasks`` until none is left or one fails: then the engine is in doubt."""
        if engine.tokenizer is None:
            raise ConfigError("has no tokenizer to ask questions with", field="model", value=self.plan.model)
        while tasks:
            row = self._task(kv, tasks.pop(0), engine, engine.tokenizer)
            yield row
            if row.status == FAILED:
                return

    def _task(self, kv: str, task: Task, engine: EvalEngine, tokenizer: Tokenizer) -> AccuracyRow:
        try:
            asks = ask(tokenizer, task.examples, max_tokens=self.plan.max_tokens)
            engine.reset_stats()
            start = self.clock()
            with self.watch(kv, task, engine):
                outputs = engine.generate([ask.prompt for ask in asks], [ask.params for ask in asks])
            seconds = self.clock() - start
            return self._row(kv, task, outputs, engine.stats(), seconds)
        except CapacityError as error:
            return self._failure(kv, task, NO_FIT, str(error))
        except (ConfigError, ModelError):
            raise
        except (QKVError, RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
            return self._failure(kv, task, FAILED, f"{type(error).__name__}: {error}")

    def _row(
        self, kv: str, task: Task, outputs: list[RequestOutput], stats: EngineStats, seconds: float
    ) -> AccuracyRow:
        replies = [output.text for output in outputs]
        found = score(replies, list(task.examples))
        first = self._first_replies.setdefault(task.label, replies)
        errors = [output.error for output in outputs if output.error is not None]
        bits = [output.kv.lowest_bits for output in outputs if output.kv.lowest_bits is not None]
        row = self._failure(kv, task, OK, None)
        return replace(
            row,
            device=stats.device,
            dtype=stats.dtype,
            right=found.correct,
            accuracy=round(found.share, 4),
            low=round(found.low, 4),
            high=round(found.high, 4),
            same=sum(map(str.__eq__, replies, first)),
            cut=sum(output.outputs[0].finish_reason == "length" for output in outputs),
            effective_bits=round(stats.effective_bits, 3),
            lowest_bits=min(bits, default=None),
            output_tokens=stats.generation_tokens,
            demotions=stats.num_demotions,
            preemptions=stats.num_preemptions,
            seconds=round(seconds, 3),
            status=FAILED if errors else OK,
            detail=f"{len(errors)} of {len(outputs)} requests failed, the first: {errors[0]}" if errors else None,
        )

    def _failure(self, kv: str, task: Task, status: str, detail: str | None) -> AccuracyRow:
        names: dict[str, Any] = {"model": self.plan.model, "task": task.name, "size": task.size, "kv": kv}
        return AccuracyRow(**names, samples=len(task.examples), status=status, detail=detail)


def accuracy_table(rows: Sequence[AccuracyRow]) -> Table:
    """The rows by task, its presets below one another; columns with nothing in them are left out."""
    tasks = list(dict.fromkeys((row.task, row.size) for row in rows))
    rows = sorted(rows, key=lambda row: tasks.index((row.task, row.size)))  # stable: presets keep their order
    columns: dict[str, list[str]] = {
        "task": [row.task for row in rows],
        "size": [str(row.size or "") for row in rows],
        "kv": [row.kv for row in rows],
        "samples": [str(row.samples) for row in rows],
        "right": [number(row.right, 0) for row in rows],
        "accuracy": ["" if row.accuracy is None else f"{row.accuracy:.1%}" for row in rows],
        "95 % interval": ["" if row.low is None else f"{row.low:.1%} - {row.high:.1%}" for row in rows],
        f"same as {rows[0].kv}": [number(row.same, 0) for row in rows] if len({r.kv for r in rows}) > 1 else [],
        "cut": [str(row.cut or "") for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "lowest": [number(row.lowest_bits, 0) for row in rows],
        "tokens": [number(row.output_tokens, 0) for row in rows],
        "demotions": [str(row.demotions or "") for row in rows],
        "preemptions": [str(row.preemptions or "") for row in rows],
        "seconds": [number(row.seconds, 1) for row in rows],
        "status": ["" if row.status == OK else row.status for row in rows],
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    return Table(_title(rows), list(shown), [list(row) for row in zip(*shown.values(), strict=True)], _notes(rows))


def _title(rows: Sequence[AccuracyRow]) -> str:
    ran = next((row for row in rows if row.device), rows[0])
    return " · ".join(part for part in (ran.model, ran.device, ran.dtype, "greedy, exact match") if part)


def _notes(rows: Sequence[AccuracyRow]) -> list[str]:
    return [f"{row.task} {row.kv} {row.status}: {row.detail}" for row in rows if row.status != OK]
