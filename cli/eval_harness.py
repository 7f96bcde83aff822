"""``qkv-engine eval --lm-eval``: tasks of the lm-evaluation-harness through the quantized cache."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine.errors import ConfigError

from . import common, results
from .log import note
from .model import check_ladders

if TYPE_CHECKING:
    from qkv_engine.bench.harness import HarnessPlan, HarnessRow

OPTIONS = ("limit", "num_fewshot", "include_path", "apply_chat_template")  # of this mode alone


def add_arguments(add: Callable[..., Any]) -> None:
    """The options of the harness; ``add`` is an argument group's ``add_argument``."""
    add(
        "--lm-eval",
        metavar="TASKS",
        help="tasks of the lm-evaluation-harness instead, such as arc_easy,gsm8k (needs the extra eval)",
    )
    add("--limit", type=int, metavar="N", help="questions of each task (default: all)")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's own)")
    add("--include-path", type=Path, metavar="DIR", help="folder with tasks of your own, as YAML")
    add("--apply-chat-template", action="store_true", default=None, help="put contexts in the model's chat template")


def run(args: argparse.Namespace) -> int:
    """Run what ``args`` ask for and return the exit code."""
    from qkv_engine.bench.harness import Tasks, harness_table, require_lm_eval, run_harness

    require_lm_eval()
    if not args.verbose and not args.debug:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of options that were given
    ladders = common.kv_ladders(args.kv, state_dtype=args.state_dtype)
    plan = _plan(args, tuple(ladders))
    results.check_targets(args)
    check_ladders(args, ladders.values())
    tasks = Tasks(plan)
    rows: list[HarnessRow] = []
    try:
        for row in run_harness(
            plan,
            tasks,
            common.eval_engines(args, ladders),
            begin=lambda kv: note(f"{plan.kvs.index(kv) + 1} of {len(plan.kvs)}: {kv}"),
            describe=common.describe_with(args),
            show_progress=sys.stderr.isatty(),
        ):
            rows.append(row)
    finally:
        if rows:  # whatever ended the run, Ctrl-C included
            results.deliver_rows(args, rows, [harness_table(rows, ladders)])
    return results.exit_code(row.status for row in rows)


def _plan(args: argparse.Namespace, kvs: tuple[str, ...]) -> HarnessPlan:
    from qkv_engine.bench.harness import HarnessPlan

    common.check_least(args, limit=1, num_fewshot=0)
    names = tuple(dict.fromkeys(name.strip() for name in args.lm_eval.split(",") if name.strip()))
    if not names:
        raise ConfigError("names no task", field="lm_eval", value=args.lm_eval, remedy="Give a list such as arc_easy")
    return HarnessPlan(
        model=args.model or common.DEMO,
        kvs=kvs,
        tasks=names,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        include_path=args.include_path,
        apply_chat_template=bool(args.apply_chat_template),
        seed=args.seed,
    )
