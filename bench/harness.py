"""Tasks of EleutherAI's lm-evaluation-harness through the quantized cache, with every KV preset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine.config import KVConfig
from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError, remedy_of_extra
from qkv_engine.presets import PRESETS

from .provenance import Provenance, block_bits, engine_values, provenance
from .report import number, short, unfilled_notes
from .scoring import ScoringEngine
from .status import FAILED, NO_FIT, OK, cause, status_cell, status_notes
from .table import Column, Table, from_rows, joined

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

BOOTSTRAP_ITERS = 1000  # resamples behind the standard errors of metrics that are no means


@dataclass(frozen=True, kw_only=True)
class HarnessPlan:
    """Tasks, groups or patterns of their names, and the options of the harness that go with them."""

    model: str
    kvs: tuple[str, ...]
    tasks: tuple[str, ...]
    limit: int | None = None  # questions of each task
    num_fewshot: int | None = None
    include_path: Path | None = None  # folder with more tasks
    apply_chat_template: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HarnessRow(Provenance):
    """One metric of one task with one KV preset.

    ``filter`` names how answers were extracted, "none" as a rule. ``stderr`` is the standard error of ``value``.
    Bits count all metadata: ``effective_bits`` those held at the peak of KV memory over all tasks, ``block_bits`` those
    of a block on the last rung. ``status`` is "ok", "does not fit" or "failed", in a row of all tasks; ``detail`` says
    why.
    """

    model: str
    task: str
    kv: str
    metric: str | None = None
    filter: str | None = None
    value: float | None = None
    stderr: float | None = None
    samples: int | None = None
    num_fewshot: int | None = None
    kv_bytes_total: int | None = None
    effective_bits: float | None = None
    block_bits: float | None = None
    lowest_bits: float | None = None
    demotions: int | None = None
    preemptions: int | None = None
    status: str
    detail: str | None = None


def require_lm_eval() -> None:
    """Raises ``ConfigError``, naming the extra, if the harness is not installed."""
    if find_spec("lm_eval") is None:
        raise ConfigError("needs the package lm-eval", field="lm_eval", remedy=remedy_of_extra("eval"))


class Tasks:
    """The tasks of a plan, found and loaded, so that mistakes are known before a model is.

    Raises ``ConfigError`` for an unknown task, and for one whose configuration or data cannot be read.
    """

    def __init__(self, plan: HarnessPlan):
        problem: ConfigError | None = None
        for self.manager in _managers(plan.include_path):
            found = {name: self.manager.match_tasks([name]) for name in plan.tasks}
            self.names = list(dict.fromkeys(chain.from_iterable(found.values())))
            problem = _unknown(name for name, matches in found.items() if not matches) or self._load()
            if problem is None:
                return
        assert problem is not None
        raise problem

    def _load(self) -> ConfigError | None:
        """Loads the tasks; returns the error if they cannot be loaded."""
        try:
            self.manager.load(self.names)
        except Exception as error:  # of YAML, of the task's own code, of the library that loads its data
            message = f"cannot be loaded: {type(error).__name__}: {error}"
            return ConfigError(message, field="lm_eval", value=",".join(self.names))
        return None


def _managers(folder: Path | None) -> Iterator[TaskManager]:
    """Task managers of ``folder`` alone, then with the harness's own tasks, which take seconds to look through."""
    from lm_eval.tasks import TaskManager

    if folder is None:
        yield TaskManager()
        return
    if not folder.is_dir():
        raise ConfigError("no such folder", field="include_path", value=str(folder))
    yield TaskManager(include_path=str(folder), include_defaults=False)
    yield TaskManager(include_path=str(folder))


def _unknown(names: Iterable[str]) -> ConfigError | None:
    """The first of ``names`` as an error."""
    remedy = "lm-eval ls tasks lists the harness's; --include-path names a folder with your own"
    return next((ConfigError("unknown task", field="lm_eval", value=name, remedy=remedy) for name in names), None)


def run_harness(
    plan: HarnessPlan,
    tasks: Tasks,
    open_engine: Callable[[str], AbstractContextManager[ScoringEngine]],
    *,
    begin: Callable[[str], None] = lambda kv: None,
    describe: Callable[[QKVError], str] = str,
    show_progress: bool = False,
) -> Iterator[HarnessRow]:
    """The rows of each preset, of which ``begin`` is told, as soon as all tasks are done with it."""
    for kv in plan.kvs:
        begin(kv)
        failed = HarnessRow(
            model=plan.model, task=",".join(plan.tasks), kv=kv, status=FAILED, **provenance(seed=plan.seed)
        )
        try:
            with open_engine(kv) as engine:
                rows = _run(plan, tasks, kv, engine, show_progress)
        except CapacityError as error:
            rows = [replace(failed, status=NO_FIT, detail=describe(error))]
        except (ConfigError, ModelError):
            raise
        except Exception as error:  # ours, of the harness or a task's own code, or torch's out of memory
            rows = [replace(failed, detail=cause(error, describe))]
        yield from rows


def _run(plan: HarnessPlan, tasks: Tasks, kv: str, engine: ScoringEngine, show_progress: bool) -> list[HarnessRow]:
    from lm_eval.evaluator import simple_evaluate

    from .lm_eval import EngineLM

    lm = EngineLM(engine, name=plan.model, show_progress=show_progress)
    engine.reset_stats()
    found = simple_evaluate(
        lm,
        tasks=tasks.names,
        task_manager=tasks.manager,
        limit=plan.limit,
        num_fewshot=plan.num_fewshot,
        apply_chat_template=plan.apply_chat_template,
        bootstrap_iters=BOOTSTRAP_ITERS,
        log_samples=False,
        random_seed=plan.seed,
        numpy_random_seed=plan.seed,
        torch_random_seed=plan.seed,
        fewshot_random_seed=plan.seed,
    )
    figures: dict[str, Any] = {
        **engine_values(engine.stats(), plan.seed),
        "block_bits": block_bits(engine.stats()),
        "model": plan.model,
        "kv": kv,
        "lowest_bits": lm.lowest_bits,
        "status": OK,
    }
    return [HarnessRow(**figures, **metric) for metric in _metrics(found)]


def _metrics(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of a row that say what was measured, of each metric of each task or group."""
    for task, results in found["results"].items():
        samples = found["n-samples"].get(task, {}).get("effective")
        for key, value in results.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = results.get(f"{metric}_stderr,{name}")
            yield {
                "task": task,
                "metric": metric,
                "filter": name,
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "samples": samples,
                "num_fewshot": found["n-shot"].get(task),
            }


def harness_table(rows: Sequence[HarnessRow], ladders: Mapping[str, KVConfig] = PRESETS) -> Table:
    """The rows by task and metric, its ``ladders`` below one another; columns with nothing in them are left out."""
    order = list(dict.fromkeys((row.task, row.metric, row.filter) for row in rows))
    rows = sorted(rows, key=lambda row: order.index((row.task, row.metric, row.filter)))  # presets keep their order
    is_filtered = bool({row.filter for row in rows} - {None, "none"})
    columns: list[Column[HarnessRow]] = [
        Column("task", lambda row: row.task, is_text=True),
        Column("metric", lambda row: row.metric or "", is_text=True),
        Column("filter", lambda row: row.filter or "" if is_filtered else "", spare=8, is_text=True),
        Column("kv", lambda row: row.kv, is_text=True),
        Column("value", lambda row: number(row.value, 4)),
        Column("±", lambda row: number(row.stderr, 4)),
        Column("samples", lambda row: number(row.samples, 0), spare=5),
        Column("few-shot", lambda row: number(row.num_fewshot or None, 0), spare=3),
        Column("bits a block", lambda row: number(row.block_bits, 2), spare=6),
        Column("bits held", lambda row: number(row.effective_bits, 2), spare=7),
        Column("lowest", lambda row: short(row.lowest_bits), spare=4),
        Column("demotions", lambda row: number(row.demotions or None, 0), spare=2),
        Column("preemptions", lambda row: number(row.preemptions or None, 0), spare=1),
        Column("status", status_cell, spare=9, is_text=True),
    ]
    names = [row.kv for row in rows]
    notes = [*status_notes(rows, names), *unfilled_notes(rows, names, ladders)]
    return from_rows(_title(rows), rows, columns, notes)


def _title(rows: Sequence[HarnessRow]) -> str:
    ran = next((row for row in rows if row.device), rows[0])
    return joined(ran.model, ran.machine, ran.dtype, "lm-evaluation-harness")
