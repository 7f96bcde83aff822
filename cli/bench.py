"""``qkv-engine bench``: throughput, latency and KV memory against batch size, for one or more KV presets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine.errors import ConfigError

from . import bench_compare, common, results, tasks
from .model import check_ladders, check_shape, read_model
from .progress import progress_bar

if TYPE_CHECKING:
    from qkv_engine import Engine, KVConfig
    from qkv_engine.bench.questions import Workload
    from qkv_engine.bench.sweep import Row, SweepPlan

DEFAULT_SWEEP = "1..32"
DEFAULT_PLOT = Path("bench.png")
DEFAULT_LEN = 128  # tokens of a random prompt, and of its output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    parser.epilog = (
        "Prompts are random tokens; outputs are greedy and exactly as long as asked. The presets of --kv run one "
        "after another and are compared with the first. Rows go to stdout, "
        "progress to stderr; Ctrl-C prints the rows measured so far. --kv-memory 8x is memory for 8 of the requests at "
        "16 bits: with --task ledger:100 --batch-sweep 20 the table shows whether the other 12 queue or run at fewer "
        "bits. docs/benchmarks.md explains the columns."
    )
    common.add_model_arguments(parser, takes_kv_list=True)
    group = parser.add_argument_group("benchmark")
    add = group.add_argument
    add(
        "--shape",
        metavar="NAME",
        help="random weights of a known shape, such as llama-3.1-8b, instead of MODEL",
    )
    add(
        "--batch-sweep",
        nargs="?",
        const=DEFAULT_SWEEP,
        default="1",
        metavar="LIST",
        help=f'batch sizes: "1,2,4", or "1..64" which doubles (default: 1; without LIST {DEFAULT_SWEEP})',
    )
    add("--input-len", type=int, metavar="N", help=f"tokens of each prompt (default: {DEFAULT_LEN})")
    add("--output-len", type=int, metavar="N", help=f"tokens of each output (default: {DEFAULT_LEN})")
    tasks.add_argument(
        add,
        "task",
        metavar="NAME:SIZE",
        help="ask questions of a demo task, such as ledger:100, instead of random prompts, and count the right answers",
    )
    add("--repeats", type=int, metavar="N", help="measured runs of a size (default: 3, with --task 1)")
    add("--warmup", type=int, metavar="N", help="runs before them (default: 1, with --task 0)")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and weights (default: %(default)s)")
    results.add_arguments(add)
    results.add_plot(add, "throughput and KV memory", DEFAULT_PLOT)
    bench_compare.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` ask for and return the exit code."""
    if bench_compare.is_asked(args):
        return bench_compare.run(args)
    from qkv_engine.bench.sweep import sweep

    ladders = common.kv_ladders(args.kv)
    plan = _plan(args, tuple(ladders))
    if args.max_model_len is None:
        args.options["max_model_len"] = "--task" if plan.workload else "--input-len + --output-len"
    results.check_targets_and_plot(args)
    check_ladders(args, ladders.values(), args.shape)
    rows: list[Row] = []
    try:
        with progress_bar(len(plan.kvs) * len(plan.batches)) as bar:
            open_engine, describe = (lambda kv: _open_engine(args, plan, ladders[kv])), common.describe_with(args)
            for row in sweep(plan, open_engine, watch=bar.watch, describe=describe):
                rows.append(row)
                bar.reach(len(rows))
    finally:
        if rows:  # whatever ended the run, Ctrl-C included
            _deliver(args, plan, ladders, rows)
    return results.exit_code(row.status for row in rows)


def _plan(args: argparse.Namespace, kvs: tuple[str, ...]) -> SweepPlan:
    from qkv_engine.bench.sweep import SweepPlan, parse_batches, parse_requests

    parse_requests(args.kv_memory)
    check_shape(args)
    batches = parse_batches(args.batch_sweep)
    workload = _workload(args, max(batches))
    repeats, warmup = (3, 1) if workload is None else (1, 0)
    return SweepPlan(
        model=args.shape or args.model or "demo",
        kvs=kvs,
        batches=batches,
        workload=workload,
        input_len=DEFAULT_LEN if args.input_len is None else args.input_len,
        output_len=DEFAULT_LEN if args.output_len is None else args.output_len,
        repeats=repeats if args.repeats is None else args.repeats,
        warmup=warmup if args.warmup is None else args.warmup,
        seed=args.seed,
    )


def _workload(args: argparse.Namespace, number: int) -> Workload | None:
    """``number`` questions of the task that was asked for, if any was."""
    from qkv_engine.bench.questions import Workload, ask, parse_tasks

    task = tasks.given(args)
    if task is None:
        return None
    for field in ("input_len", "output_len"):
        value, remedy = getattr(args, field), f"Leave it or --{task.field} out"
        if value is not None:
            raise ConfigError("questions have lengths of their own", field=field, value=value, remedy=remedy)
    found = parse_tasks(task.text, samples=number, seed=args.seed, field=task.field)
    if len(found) > 1:
        raise ConfigError("one task at a time", field=task.field, value=task.text)
    tokenizer = read_model(args, args.shape).tokenizer(task.field)
    return Workload(found[0], ask(tokenizer, found[0].examples))


def _open_engine(args: argparse.Namespace, plan: SweepPlan, kv: KVConfig) -> Engine:
    """An engine for one ladder, large enough for the longest request and the largest batch of the plan."""
    options: dict[str, Any] = {"kv": kv, "max_num_seqs": max(plan.batches), "seed": plan.seed}
    if args.max_model_len is None:
        options["max_model_len"] = plan.num_tokens + 1
    if args.shape is not None:
        options |= {"model": args.shape, "load_format": "random"}
    nbytes = _nbytes_for_requests(args, plan)
    if nbytes is not None:
        options["kv_memory"] = nbytes
    # Repeats ask the same questions and random prompts share beginnings by chance: neither may profit from the other.
    return common.open_engine(args, **options, prefix_caching=False)


def _nbytes_for_requests(args: argparse.Namespace, plan: SweepPlan) -> int | None:
    """Bytes that a ``--kv-memory`` such as "8x" stands for; None for any other."""
    from qkv_engine.bench.sweep import parse_requests

    number = parse_requests(args.kv_memory)
    if number is None:
        return None
    from qkv_engine.bench.sizing import nbytes_for

    return nbytes_for(read_model(args, args.shape).config, number, plan.num_tokens)


def _deliver(args: argparse.Namespace, plan: SweepPlan, ladders: Mapping[str, KVConfig], rows: Sequence[Row]) -> None:
    """Rows to stdout, to the file and into the plot."""
    from qkv_engine.bench.plots import plot_sweep
    from qkv_engine.bench.report import render, sweep_table, workload_table

    table = (sweep_table if plan.workload is None else workload_table)(rows, ladders)
    extras = []
    if args.plot is not None:
        kind = args.plot.suffix.lower().removeprefix(".")
        extras.append(results.Extra(args.plot, lambda: plot_sweep(rows, kind=kind), "a plot"))
    what = f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
    results.deliver(args, lambda form, width: render(form, rows, table, width=width), what, *extras)
