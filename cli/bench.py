"""``qkv-engine bench``: throughput, latency and KV memory against batch size, for one or more KV presets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv_engine.config import DEFAULT_KV
from qkv_engine.errors import ConfigError

from . import common, results
from .model import read_model
from .progress import progress_bar

if TYPE_CHECKING:
    from qkv_engine import Engine
    from qkv_engine.bench.questions import Workload
    from qkv_engine.bench.sweep import Row, SweepPlan

DEFAULT_SWEEP = "1..32"
DEFAULT_PLOT = Path("bench.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    parser.epilog = (
        "Prompts are random tokens; outputs are greedy and exactly as long as asked. --kv takes a list, such "
        "as bf16,fp32: the presets run one after another and are compared with the first. Rows go to stdout, "
        "progress to stderr; Ctrl-C prints the rows measured so far. --kv-memory 8x is memory for 8 of the requests at "
        "16 bits; with --task ledger:100 --batch-sweep 20 it shows what becomes of the other 12."
    )
    common.add_model_arguments(parser)
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
    add("--input-len", type=int, default=128, metavar="N", help="tokens of each prompt (default: %(default)s)")
    add(
        "--output-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each output (default: %(default)s)",
    )
    add(
        "--task",
        metavar="NAME:SIZE",
        help="ask questions of a demo task, such as ledger:100, instead, and count the right answers",
    )
    add("--repeats", type=int, metavar="N", help="measured runs of a size (default: 3, with --task 1)")
    add("--warmup", type=int, metavar="N", help="runs before them (default: 1, with --task 0)")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and weights (default: %(default)s)")
    results.add_arguments(add)
    add(
        "--plot",
        nargs="?",
        const=DEFAULT_PLOT,
        type=Path,
        metavar="FILE.png",
        help=f"draw throughput and KV memory (without FILE: {DEFAULT_PLOT}; needs qkv-engine[bench])",
    )


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` ask for and return the exit code."""
    from qkv_engine.bench.sweep import sweep

    plan = _plan(args)
    _check_targets(args)
    rows: list[Row] = []
    try:
        with progress_bar(len(plan.kvs) * len(plan.batches)) as bar:

            def on_run(kv: str, batch: int) -> None:
                bar.begin(f"{kv}, batch {batch}")

            for row in sweep(plan, lambda kv: _open_engine(args, plan, kv), on_run=on_run):
                rows.append(row)
                bar.advance()
    finally:
        if rows:  # whatever ended the run, Ctrl-C included
            _deliver(args, rows)
    return results.exit_code(row.status for row in rows)


def _plan(args: argparse.Namespace) -> SweepPlan:
    from qkv_engine.bench.sweep import SweepPlan, parse_batches, parse_requests

    parse_requests(args.kv_memory)
    if args.shape is not None:
        common.load_torch()
        from qkv_engine.models.shapes import SHAPES

        if args.model is not None:
            raise ConfigError("cannot be combined with MODEL", field="shape", value=args.shape)
        if args.shape not in SHAPES:
            remedy = f"Choose from {', '.join(SHAPES)}"
            raise ConfigError("unknown shape", field="shape", value=args.shape, remedy=remedy)
    batches = parse_batches(args.batch_sweep)
    repeats, warmup = (3, 1) if args.task is None else (1, 0)
    return SweepPlan(
        model=args.shape or args.model or "demo",
        kvs=common.kv_list(args.kv or DEFAULT_KV),
        batches=batches,
        workload=None if args.task is None else _workload(args, max(batches)),
        input_len=args.input_len,
        output_len=args.output_len,
        repeats=repeats if args.repeats is None else args.repeats,
        warmup=warmup if args.warmup is None else args.warmup,
        seed=args.seed,
    )


def _workload(args: argparse.Namespace, number: int) -> Workload:
    """``number`` questions of the task that ``--task`` names."""
    from qkv_engine.bench.questions import Workload, ask, parse_tasks

    tasks = parse_tasks(args.task, samples=number, seed=args.seed)
    if len(tasks) > 1:
        raise ConfigError("one task at a time", field="task", value=args.task)
    tokenizer = read_model(args, args.shape).tokenizer("task")
    return Workload(tasks[0], ask(tokenizer, tasks[0].examples))


def _check_targets(args: argparse.Namespace) -> None:
    """Refuse before the run what could not be written after it."""
    results.check_targets(args, "plot")
    if args.plot is not None:
        from qkv_engine.bench.plots import require_matplotlib

        require_matplotlib()
        if args.plot.suffix.lower() != ".png":
            raise ConfigError("plots are PNG files", field="plot", value=str(args.plot))


def _open_engine(args: argparse.Namespace, plan: SweepPlan, kv: str) -> Engine:
    """An engine for one preset, large enough for the longest request and the largest batch of the plan."""
    common.load_torch()
    from qkv_engine import Engine

    options: dict[str, Any] = {"max_model_len": plan.num_tokens + 1} | common.engine_options(args)
    options |= {"kv": kv, "max_num_seqs": max(plan.batches), "seed": plan.seed}
    if args.shape is not None:
        options |= {"model": args.shape, "load_format": "random"}
    nbytes = _nbytes_for_requests(args, plan)
    if nbytes is not None:
        options["kv_memory"] = nbytes
    # Repeats ask the same questions and random prompts share beginnings by chance: neither may profit from the other.
    return Engine(**options, prefix_caching=False)


def _nbytes_for_requests(args: argparse.Namespace, plan: SweepPlan) -> int | None:
    """Bytes that a ``--kv-memory`` such as "8x" stands for; None for any other."""
    from qkv_engine.bench.sweep import parse_requests

    number = parse_requests(args.kv_memory)
    if number is None:
        return None
    from qkv_engine.bench.sizing import nbytes_for

    return nbytes_for(read_model(args, args.shape).config, number, plan.num_tokens)


def _deliver(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Rows to stdout, to the file and into the plot."""
    from qkv_engine.bench.plots import plot_sweep
    from qkv_engine.bench.report import sweep_table, workload_table, write_file

    more: list[Callable[[], None]] = []
    if args.plot is not None:
        more.append(lambda: write_file(args.plot, plot_sweep(rows)))
    table = sweep_table(rows) if args.task is None else workload_table(rows)
    results.deliver(args, rows, table, *more)
