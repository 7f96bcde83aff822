"""``qkv-engine eval --divergence``: how far each KV preset's next tokens are from those of the first."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import common, results
from .model import check_ladders

if TYPE_CHECKING:
    from qkv_engine.bench.questions import Task

EXCLUDES = ("max_tokens", "log_samples", "perplexity", "lm_eval")


def add_arguments(add: Callable[..., Any]) -> None:
    """The option of this mode; ``add`` is an argument group's ``add_argument``."""
    add(
        "--divergence",
        action="store_true",
        help="KL divergence of each preset from the first one of --kv under teacher forcing: of the right replies of "
        '--tasks, or of the lines of --data, {"text": "..."} or {"prompt": "...", "answer": "..."}',
    )


def run(args: argparse.Namespace, tasks: tuple[Task, ...], samples: int) -> int:
    """Measure the right replies of ``tasks`` and ``samples`` lines of ``args.data``; return the exit code."""
    from qkv_engine.bench.divergence import DivergencePlan, divergence_table, measure_divergence

    ladders = common.kv_ladders(args.kv, state_dtype=args.state_dtype)
    plan = DivergencePlan(
        model=args.model or common.DEMO,
        kvs=tuple(ladders),
        tasks=tasks,
        data=args.data,
        samples=samples,
        seed=args.seed,
    )
    results.check_targets(args)
    check_ladders(args, ladders.values())
    open_engine, describe = common.eval_engines(args, ladders), common.describe_with(args)
    rows = results.collect(
        len(plan.kvs) * len(plan.sets),
        lambda bar: measure_divergence(plan, open_engine, watch=bar.watch, describe=describe),
        lambda rows: results.deliver_rows(args, rows, [divergence_table(rows, ladders)]),
    )
    return results.exit_code(row.status for row in rows)
