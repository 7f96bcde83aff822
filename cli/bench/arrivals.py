"""``qkv-engine bench --arrivals``: requests that come one by one, streamed, for one or more KV presets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qkv_engine.errors import ConfigError

from .. import common, results, tasks
from ..model import bench_options, check_ladders, read_model

if TYPE_CHECKING:
    from qkv_engine import Engine, KVConfig
    from qkv_engine.bench.arrivals import ArrivalsPlan, Measured
    from qkv_engine.bench.load import Range
    from qkv_engine.bench.questions import Workload
    from qkv_engine.bench.traces import Arrival

DEFAULT_LEN = 128  # tokens of a random prompt, and of its output
DEFAULT_REQUESTS = 128
MAX_REQUESTS = 65_536
EXCLUDED = {
    "arrivals": ("batch_sweep", "repeats", "preset", "sampled", "eval", "samples", "pareto"),
    "trace": ("task", "tasks", "input_len", "output_len"),  # it has lengths of its own
}
NEEDED = dict.fromkeys(("requests", "trace", "goodput", "timeline"), ("arrivals",))
TIMELINE_SUFFIXES = (".jsonl",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench --arrivals``, a group of their own."""
    add = parser.add_argument_group("arrivals").add_argument
    add(
        "--arrivals",
        metavar="RATE",
        help="stream requests that come one by one (Poisson) instead of a batch: requests a second, or a list such as "
        '"8,16,inf", where "inf" is all at once and "trace" the times of --trace',
    )
    add("--requests", type=int, metavar="N", help=f"requests of a run (default: {DEFAULT_REQUESTS})")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths, and times for --arrivals trace, of Mooncake's JSON lines or Azure's .csv",
    )
    add(
        "--goodput",
        metavar="LIMITS",
        help="count requests a second that met all limits in ms on ttft, tpot and e2e, such as ttft:1000,tpot:50",
    )
    add("--timeline", type=Path, metavar="FILE", help="write blocks by rung, memory and load over time as .jsonl")


def length(word: str) -> int | str:
    """Tokens, or a range such as "128..2048" as it was given."""
    return word if ".." in word else int(word)


def refuse_ranges(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for lengths of batches that are ranges."""
    for field in ("input_len", "output_len"):
        if isinstance(value := getattr(args, field), str):
            remedy = "Give one length, or add --arrivals"
            raise ConfigError("a range needs --arrivals", field=field, value=value, remedy=remedy)


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` ask for and return the exit code."""
    from qkv_engine.bench.arrivals import measure

    ladders = common.kv_ladders(args.kv, state_dtype=args.state_dtype)
    plan = _plan(args, tuple(ladders))
    if args.max_model_len is None:
        asked = {"trace": args.trace, "task": plan.workload}
        options = [f"--{option}" for option, value in asked.items() if value is not None]
        args.options["max_model_len"] = options[0] if options else "--input-len + --output-len"
    results.check_targets_and_plot(args, timeline=TIMELINE_SUFFIXES)
    check_ladders(args, ladders.values(), args.shape)
    describe = common.describe_with(args)
    found = results.collect(
        len(plan.kvs) * len(plan.rates),
        lambda bar: measure(plan, lambda kv: _open_engine(args, plan, ladders[kv]), watch=bar.watch, describe=describe),
        lambda found: _deliver(args, ladders, found),
    )
    return results.exit_code(one.row.status for one in found)


def _plan(args: argparse.Namespace, kvs: tuple[str, ...]) -> ArrivalsPlan:
    from qkv_engine.bench.arrivals import ArrivalsPlan
    from qkv_engine.bench.batches import parse_requests
    from qkv_engine.bench.load import parse_limits, parse_rates

    parse_requests(args.kv_memory)
    number = _number(args)
    workload = tasks.workload(args, number)
    requests = _asked(workload) if workload else _requests(args, number)
    return ArrivalsPlan(
        model=args.shape or args.model or common.DEMO,
        kvs=kvs,
        rates=parse_rates(args.arrivals, has_times=requests[0].seconds is not None),
        requests=tuple(requests),
        workload=workload,
        limits={} if args.goodput is None else parse_limits(args.goodput),
        warmup=1 if args.warmup is None else args.warmup,
        seed=args.seed,
    )


def _number(args: argparse.Namespace) -> int:
    number = DEFAULT_REQUESTS if args.requests is None else args.requests
    if not 1 <= number <= MAX_REQUESTS:
        raise ConfigError("out of range", field="requests", value=number, remedy=f"Give 1 to {MAX_REQUESTS:,}")
    return int(number)


def _asked(workload: Workload) -> list[Arrival]:
    """The lengths of questions; of their answers the most that is allowed."""
    from qkv_engine.bench.traces import Arrival

    return [Arrival(len(ask.prompt), ask.params.max_tokens or 1) for ask in workload.asks]


def _requests(args: argparse.Namespace, number: int) -> list[Arrival]:
    """The lengths of random prompts and of their outputs, and their times if a trace has them."""
    from qkv_engine.bench.load import draw_requests
    from qkv_engine.bench.traces import read_trace

    if args.trace is None:
        return draw_requests(number, _lengths(args, "input_len"), _lengths(args, "output_len"), args.seed)
    context = args.max_model_len
    if context is None and not args.extend_context:
        context = read_model(args, args.shape).config.max_context
    return read_trace(args.trace, limit=number, context=context)


def _lengths(args: argparse.Namespace, field: str) -> Range:
    from qkv_engine.bench.load import parse_lengths

    value = getattr(args, field)
    return parse_lengths(str(DEFAULT_LEN if value is None else value), field)


def _open_engine(args: argparse.Namespace, plan: ArrivalsPlan, kv: KVConfig) -> Engine:
    """An engine for one ladder, large enough for the longest request of the plan."""
    return common.open_engine(args, kv=kv, **bench_options(args, plan.num_tokens))


def _deliver(args: argparse.Namespace, ladders: Mapping[str, KVConfig], found: Sequence[Measured]) -> None:
    """Rows to stdout, to the file and into the plot; the series to theirs."""
    from qkv_engine.bench.arrivals_report import arrivals_tables
    from qkv_engine.bench.plots.arrivals import plot_arrivals

    rows, extras = [one.row for one in found], []
    if args.timeline is not None:
        extras.append(results.Extra(args.timeline, lambda: _timeline(found), "a timeline"))
    extras += results.plot(args, lambda kind: plot_arrivals(found, _bits_of_rungs(args, ladders), kind=kind))
    results.deliver_rows(args, rows, arrivals_tables(rows, ladders), *extras)


def _timeline(found: Sequence[Measured]) -> bytes:
    """The samples of all runs as JSON lines, each with its preset and its rate."""
    from qkv_engine.bench.report import as_json

    keys = [{"kv": one.row.kv, "rate": one.row.rate} for one in found]
    lines = (as_json(key | sample._asdict()) for key, one in zip(keys, found, strict=True) for sample in one.series)
    return "".join(f"{line}\n" for line in lines).encode()


def _bits_of_rungs(args: argparse.Namespace, ladders: Mapping[str, KVConfig]) -> dict[str, float]:
    """Bits a KV element on each rung of all ladders, metadata counted, by name."""
    from qkv_engine.bench.sizing import make_ladder

    config = read_model(args, args.shape).config
    rungs = [rung for kv in ladders.values() for rung in make_ladder(kv, config, config.dtype).rungs]
    return {rung.name: rung.effective_bits for rung in rungs}
