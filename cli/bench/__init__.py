"""``qkv-engine bench``: throughput, latency and KV memory against batch size, for one or more KV presets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qkv_engine.bench.batches import MAX
from qkv_engine.bench.papers import KVMIX_RANDOM, PAPERS, Experiment
from qkv_engine.errors import CapacityError, ConfigError

from .. import common, results, tasks
from ..combinations import check_combinations
from ..model import bench_options, check_ladders, check_shape, kv_nbytes, machine, read_model
from . import arrivals as bench_arrivals
from . import compare as bench_compare
from . import preset as bench_preset
from . import quality
from .arrivals import DEFAULT_LEN

if TYPE_CHECKING:
    from qkv_engine import Engine, KVConfig
    from qkv_engine.bench.filled import FilledEngine
    from qkv_engine.bench.quality import RatedRow
    from qkv_engine.bench.sweep import SweepPlan, SweepRow

    from ..progress import ProgressBar

DEFAULT_SWEEP = "1..32"
DEFAULT_PLOT = Path("bench.png")
EXCLUDED: dict[str, tuple[str, ...]] = {
    **bench_arrivals.EXCLUDED,
    "memory": ("kv_memory",),
    "pareto": ("preset", "tensor_parallel"),
    "task": ("tasks", "input_len", "output_len", "preset", "sampled", "eval", "pareto"),
    "tasks": ("input_len", "output_len", "preset", "sampled", "eval", "pareto"),
    "sampled": ("repeats", "warmup", "tensor_parallel"),
}
NEEDED = {
    **bench_compare.NEEDED,
    **bench_arrivals.NEEDED,
    **dict.fromkeys(("samples", "eval_plans"), ("eval", "pareto")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    parser.epilog = (
        "Prompts are random tokens; outputs are greedy and exactly as long as asked. The presets of --kv run one "
        "after another and are compared with the first. Rows go to stdout, "
        "progress to stderr; Ctrl-C prints the rows measured so far. --kv-memory 8x is memory for 8 of the requests at "
        "16 bits: with --task ledger:100 --batch-sweep 20 the table shows whether the other 12 queue or run at fewer "
        "bits. " + quality.EPILOG + "docs/benchmarks.md explains the columns."
    )
    common.add_model_arguments(parser, takes_kv_list=True)
    group = parser.add_argument_group("benchmark")
    add = group.add_argument
    add(
        "--preset",
        metavar="PAPER",
        help=f"a paper's experiment, whose published figures are shown beside ours: {', '.join(PAPERS)}. Any other "
        "option overrides its value; without MODEL and --shape it is scaled down to the demo model",
    )
    add(
        "--shape",
        metavar="NAME",
        help='random weights of a known shape, such as llama-3.1-8b, instead of MODEL; "demo" is the demo model itself',
    )
    add(
        "--batch-sweep",
        nargs="?",
        const=DEFAULT_SWEEP,
        metavar="LIST",
        help='batch sizes: "1,2,4", or "1..64" which doubles; "max" is the largest batch that fits, as in "8,max" '
        f"(default: 1; without LIST {DEFAULT_SWEEP})",
    )
    add("--memory", metavar="SIZE", help="memory for weights and KV cache together, in place of --kv-memory")
    add(
        "--sampled",
        action="store_true",
        help="skip the prompts: fill KV memory with random numbers and time decode steps at a few contexts",
    )
    add(
        "--input-len",
        type=bench_arrivals.length,
        metavar="N",
        help=f"tokens of each prompt, with --arrivals also a range such as 128..2048 (default: {DEFAULT_LEN})",
    )
    add(
        "--output-len",
        type=bench_arrivals.length,
        metavar="N",
        help=f"tokens of each output, with --arrivals also a range such as 128..2048 (default: {DEFAULT_LEN})",
    )
    tasks.add_argument(
        add,
        "task",
        metavar="NAME:SIZE",
        help="ask questions of a demo task, such as ledger:100, instead of random prompts, and count the right answers",
    )
    quality.add_arguments(add)
    add("--repeats", type=int, metavar="N", help="measured runs of a size (default: 3, with --task 1)")
    add("--warmup", type=int, metavar="N", help="runs before them (default: 1, with --task 0)")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and weights (default: %(default)s)")
    results.add_arguments(add)
    results.add_plot(add, "throughput and KV memory, or what --pareto compares,", DEFAULT_PLOT)
    bench_arrivals.add_arguments(parser)
    bench_compare.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` ask for and return the exit code."""
    of_measurements = tuple(field for field in args.options if field not in bench_compare.OPTIONS)
    check_combinations(args, excluded={"compare": of_measurements, **EXCLUDED}, needed=NEEDED)
    if args.compare is not None:
        return bench_compare.run(args)
    check_shape(args)
    if args.shape == common.DEMO:
        args.shape = None
    if args.arrivals is not None:
        return bench_arrivals.run(args)
    return _run_sweep(args)


def _run_sweep(args: argparse.Namespace) -> int:
    from qkv_engine.bench.quality import rate
    from qkv_engine.bench.sweep import sweep

    bench_arrivals.refuse_ranges(args)
    quality.set_defaults(args)
    bench_preset.resolve(args)
    results.check_targets_and_plot(args)
    ladders = _ladders(args)
    plan = _plan(args, tuple(ladders))
    asked = quality.questions(args)
    if MAX in (args.batch_sweep or ""):
        plan = _with_largest(args, plan, ladders)
    if args.max_model_len is None:
        args.options["max_model_len"] = "--task" if plan.workload else "--input-len + --output-len"
        quality.make_room(args, asked, plan)
    check_ladders(args, ladders.values(), args.shape)
    answers = quality.answering(args, asked, plan, ladders, lambda each, ladder: _open_engine(args, each, ladder))

    def measure(bar: ProgressBar) -> Iterator[SweepRow]:
        answers.watch, answers.on_found = bar.watch, bar.advance
        return sweep(plan, answers.open, watch=bar.watch, describe=common.describe_with(args))

    rows = results.collect(
        plan.num_rows + len(ladders) * bool(asked.tasks),
        measure,
        lambda rows: _deliver(args, plan, ladders, rate(rows, answers.found)),
    )
    return results.exit_code(row.status for row in rows)


def _ladders(args: argparse.Namespace) -> dict[str, KVConfig]:
    """The ladders of ``--kv`` by name."""
    drawn = {}
    if KVMIX_RANDOM in (args.kv or ""):
        from qkv_engine.planner.kvmix import KVmix
        from qkv_engine.planner.profile import LayerScores

        none = [0.0] * read_model(args, args.shape).config.num_layers
        drawn[KVMIX_RANDOM] = KVmix(random_seed=args.seed).ladder(KVMIX_RANDOM, LayerScores(k=none, v=none))
    return common.kv_ladders(args.kv, drawn, state_dtype=args.state_dtype)


def _plan(args: argparse.Namespace, kvs: tuple[str, ...]) -> SweepPlan:
    from qkv_engine.bench.batches import parse_batches, parse_requests
    from qkv_engine.bench.sweep import SweepPlan

    parse_requests(args.kv_memory)
    if tasks.given(args) is not None and MAX in (args.batch_sweep or ""):
        message, remedy = f"{MAX} cannot be combined with --task", "Give the number of questions"
        raise ConfigError(message, field="batch_sweep", value=args.batch_sweep, remedy=remedy)
    batches = parse_batches("1" if args.batch_sweep is None else args.batch_sweep, 1)  # the largest is known later
    workload = tasks.workload(args, max(batches))
    repeats, warmup = (3, 1) if workload is None else (1, 0)
    return SweepPlan(
        model=args.shape or args.model or common.DEMO,
        kvs=kvs,
        batches=batches,
        workload=workload,
        input_len=DEFAULT_LEN if args.input_len is None else args.input_len,
        output_len=DEFAULT_LEN if args.output_len is None else args.output_len,
        repeats=repeats if args.repeats is None else args.repeats,
        warmup=warmup if args.warmup is None else args.warmup,
        seed=args.seed,
        sampled=args.sampled,
        preset=args.preset,
    )


def _with_largest(args: argparse.Namespace, plan: SweepPlan, ladders: Mapping[str, KVConfig]) -> SweepPlan:
    """``plan`` with the largest batch of each preset in place of "max"."""
    found = machine(args)
    from qkv_engine.bench.batches import parse_batches
    from qkv_engine.bench.sizing import largest_batch, make_ladder

    try:
        nbytes = kv_nbytes(args, plan.num_tokens)
    except CapacityError:  # a row of each size will say so
        nbytes = 0
    own = {}
    for kv, config in ladders.items():
        largest = largest_batch(
            make_ladder(config, found.config, found.dtype, found.num_ranks), nbytes, plan.num_tokens
        )
        own[kv] = tuple(sorted(parse_batches(args.batch_sweep, largest)))
    return replace(plan, own_batches=own, batches=tuple(sorted(set().union(*own.values()))))


def _open_engine(args: argparse.Namespace, plan: SweepPlan, kv: KVConfig) -> Engine | FilledEngine:
    """An engine for one ladder, large enough for the longest request and the ladder's largest batch."""
    most = max(plan.batches_of(kv.name))
    options = bench_options(args, plan.num_tokens)
    options |= {"kv": kv, "max_num_seqs": most, "max_num_batched_tokens": max(2048, most)}
    if not plan.sampled:
        return common.open_engine(args, **options)
    from qkv_engine.bench.filled import FilledEngine
    from qkv_engine.config import EngineConfig

    return FilledEngine(EngineConfig(**common.engine_options(args) | options))


def _deliver(
    args: argparse.Namespace, plan: SweepPlan, ladders: Mapping[str, KVConfig], rows: Sequence[RatedRow]
) -> None:
    """Rows to stdout, to the file and into the plot."""
    from qkv_engine.bench.plots.sweep import plot_sweep
    from qkv_engine.bench.quality import sweep_tables

    if args.pareto:
        return quality.deliver_pareto(args, ladders, rows)
    experiment = Experiment.of(plan.preset, plan.model)
    picture = results.plot(args, lambda kind: plot_sweep(rows, kind=kind, experiment=experiment))
    results.deliver_rows(args, rows, sweep_tables(rows, ladders), *picture)
