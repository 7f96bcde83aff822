"""``qkv-engine eval --perplexity``: perplexity of a text through the quantized cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import common, results
from .model import check_ladders

if TYPE_CHECKING:
    pass

OPTIONS = ("context", "stride")  # of this mode alone


def add_arguments(add: Callable[..., Any]) -> None:
    """The options of perplexity; ``add`` is an argument group's ``add_argument``."""
    add("--perplexity", type=Path, metavar="FILE", help="perplexity of a text instead of questions, in windows")
    add("--context", type=int, metavar="N", help="tokens of a window (default: 2048, or what the model takes)")
    add("--stride", type=int, metavar="N", help="tokens scored at the end of each window (default: half of it)")


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` ask for and return the exit code."""
    from qkv_engine.bench.perplexity import PerplexityPlan, measure_perplexity, perplexity_table, read_text

    ladders = common.kv_ladders(args.kv, state_dtype=args.state_dtype)
    text = read_text(args.perplexity)
    results.check_targets(args)
    check_ladders(args, ladders.values())
    plan = PerplexityPlan(
        model=args.model or common.DEMO, kvs=tuple(ladders), text=text, context=args.context, stride=args.stride
    )
    open_engine, describe = common.eval_engines(args, ladders), common.describe_with(args)
    rows = results.collect(
        len(plan.kvs),
        lambda bar: measure_perplexity(plan, open_engine, watch=bar.watch, describe=describe),
        lambda rows: results.deliver_rows(args, rows, [perplexity_table(rows, ladders)]),
    )
    return results.exit_code(row.status for row in rows)
