"""``qkv-engine eval``: how many answers are right with each KV preset, through the real quantized cache."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from qkv_engine.config import DEFAULT_KV
from qkv_engine.errors import ConfigError

from . import common, results
from .progress import Bar, progress_bar

if TYPE_CHECKING:
    from qkv_engine import Engine
    from qkv_engine.bench.accuracy import AccuracyPlan, AccuracyRow, EvalEngine
    from qkv_engine.bench.questions import Task

DEFAULT_TASKS = "ledger:40,lookup:100,addition:10"
DEFAULT_SAMPLES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``eval``."""
    parser.epilog = (
        "A reply is right if what follows its <think> block is exactly the answer. Outputs are greedy; every preset "
        "of --kv is asked the same questions, all of a task at once. Rows go to stdout, progress to stderr; Ctrl-C "
        "prints the rows there are."
    )
    common.add_model_arguments(parser)
    add = parser.add_argument_group("evaluation").add_argument
    add(
        "--tasks",
        metavar="LIST",
        help=f'demo tasks with their sizes, such as "ledger:40,sorting" (default: {DEFAULT_TASKS})',
    )
    add(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help='questions of your own: {"prompt": "...", "answer": "..."} a line; alone unless --tasks is given too',
    )
    add("--samples", type=int, default=DEFAULT_SAMPLES, metavar="N", help="questions a task (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the demo tasks (default: %(default)s)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest reply (default: a little more than the right one's; 512 where that is unknown)",
    )
    results.add_arguments(add)


def run(args: argparse.Namespace) -> int:
    """Ask what ``args`` want asked and return the exit code."""
    from qkv_engine.bench.accuracy import accuracy_table, evaluate

    plan = _plan(args)
    results.check_targets(args)
    rows: list[AccuracyRow] = []
    try:
        with progress_bar(len(plan.kvs) * sum(len(task.examples) for task in plan.tasks)) as bar:
            rows.extend(evaluate(plan, lambda kv: _open_engine(args, kv), watch=_Watch(bar)))
    finally:
        if rows:  # whatever ended the run, Ctrl-C included
            results.deliver(args, rows, accuracy_table(rows))
    return results.exit_code(row.status for row in rows)


def _plan(args: argparse.Namespace) -> AccuracyPlan:
    from qkv_engine.bench.accuracy import AccuracyPlan
    from qkv_engine.bench.questions import parse_tasks, read_questions

    for field in ("samples", "max_tokens"):
        value = getattr(args, field)
        if value is not None and value < 1:
            raise ConfigError("must be at least 1", field=field, value=value)
    tasks: tuple[Task, ...] = ()
    if args.tasks is not None or args.data is None:
        tasks = parse_tasks(args.tasks or DEFAULT_TASKS, samples=args.samples, seed=args.seed)
    if args.data is not None:
        tasks += (read_questions(args.data, samples=args.samples),)
    kvs = common.kv_list(args.kv or DEFAULT_KV)
    return AccuracyPlan(model=args.model or "demo", kvs=kvs, tasks=tasks, max_tokens=args.max_tokens)


def _open_engine(args: argparse.Namespace, kv: str) -> Engine:
    """An engine for one preset. No prefix is shared: every question's KV takes its own way down."""
    common.load_torch()
    from qkv_engine import Engine

    return Engine(**common.engine_options(args) | {"kv": kv, "prefix_caching": False})


class _Watch:
    """Moves the bar by one for every answered question."""

    def __init__(self, bar: Bar):
        self._bar = bar

    def __call__(self, kv: str, task: Task, engine: EvalEngine) -> AbstractContextManager[None]:
        def count() -> int:
            stats = engine.stats()
            return stats.num_finished + stats.num_failed

        return self._bar.following(f"{kv}, {task.label}", len(task.examples), count)
