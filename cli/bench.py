"""``qkv-engine bench``: throughput, latency and KV memory against batch size, for one or more KV presets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qkv_engine.config import DEFAULT_KV, resolve_kv
from qkv_engine.errors import ConfigError

from . import common

if TYPE_CHECKING:
    from rich.progress import Progress

    from qkv_engine import Engine
    from qkv_engine.bench.sweep import Row, SweepPlan

FORMATS = ("table", "md", "csv", "json", "jsonl")
DEFAULT_SWEEP = "1..32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    parser.epilog = (
        "Prompts are random tokens; outputs are greedy and exactly as long as asked. --kv takes a list, such "
        "as bf16,fp32: the presets run one after another and are compared with the first. Rows go to stdout, "
        "progress to stderr; Ctrl-C prints the rows measured so far."
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
    add("--repeats", type=int, default=3, metavar="N", help="measured runs of a size (default: %(default)s)")
    add("--warmup", type=int, default=1, metavar="N", help="runs before them (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and weights (default: %(default)s)")
    add("-o", dest="format", choices=FORMATS, default="table", help="form of the rows (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the rows to FILE too, in the form its suffix names")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw throughput and KV memory (needs qkv-engine[bench])",
    )


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` ask for and return the exit code."""
    from qkv_engine.bench.sweep import sweep

    plan = _plan(args)
    _check_targets(args)
    rows: list[Row] = []
    try:
        with _progress(len(plan.kvs) * len(plan.batches)) as bar:
            for row in sweep(plan, lambda kv: _open_engine(args, plan, kv), on_run=bar.begin):
                rows.append(row)
                bar.advance()
    finally:
        if rows:  # whatever ended the run, Ctrl-C included
            _deliver(args, rows)
    return _exit_code(rows)


def _plan(args: argparse.Namespace) -> SweepPlan:
    from qkv_engine.bench.sweep import SweepPlan, parse_batches

    if args.shape is not None:
        from qkv_engine.models.shapes import SHAPES

        if args.model is not None:
            raise ConfigError("cannot be combined with MODEL", field="shape", value=args.shape)
        if args.shape not in SHAPES:
            remedy = f"Choose from {', '.join(SHAPES)}"
            raise ConfigError("unknown shape", field="shape", value=args.shape, remedy=remedy)
    kvs = tuple(dict.fromkeys(name.strip() for name in (args.kv or DEFAULT_KV).split(",")))
    for kv in kvs:
        resolve_kv(kv)
    return SweepPlan(
        model=args.shape or args.model or "demo",
        kvs=kvs,
        batches=parse_batches(args.batch_sweep),
        input_len=args.input_len,
        output_len=args.output_len,
        repeats=args.repeats,
        warmup=args.warmup,
        seed=args.seed,
    )


def _check_targets(args: argparse.Namespace) -> None:
    """Refuse before the run what could not be written after it."""
    for field in ("output", "plot"):
        path: Path | None = getattr(args, field)
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError("no such folder", field=field, value=str(path))
    if args.plot is not None:
        from qkv_engine.bench.plots import require_matplotlib

        require_matplotlib()
        if args.plot.suffix.lower() != ".png":
            raise ConfigError("plots are PNG files", field="plot", value=str(args.plot))


def _open_engine(args: argparse.Namespace, plan: SweepPlan, kv: str) -> Engine:
    """An engine for one preset, large enough for the longest request and the largest batch of the plan."""
    from qkv_engine import Engine

    options = {"max_model_len": plan.input_len + plan.output_len} | common.engine_options(args)
    if args.shape is not None:
        options |= {"model": args.shape, "load_format": "random"}
    return Engine(**options | {"kv": kv, "max_num_seqs": max(plan.batches), "seed": plan.seed})


def _deliver(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Rows to stdout, to the file and into the plot; each is tried, whatever befalls the others."""
    from qkv_engine.bench.plots import plot_sweep
    from qkv_engine.bench.report import PLAIN_WIDTH, SUFFIXES, render, sweep_table, write_file

    def show() -> None:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        sys.stdout.write(render(args.format, rows, sweep_table(rows), width=width))
        sys.stdout.flush()

    with ExitStack() as stack:
        if args.plot is not None:
            stack.callback(lambda: write_file(args.plot, plot_sweep(rows)))
        if args.output is not None:
            kind = SUFFIXES.get(args.output.suffix.lower(), args.format)
            text = render(kind, rows, sweep_table(rows))
            stack.callback(write_file, args.output, text.encode())
        stack.callback(show)


def _exit_code(rows: Sequence[Row]) -> int:
    """Failure if any size failed, capacity if none fitted."""
    from qkv_engine.bench.sweep import FAILED, NO_FIT

    statuses = {row.status for row in rows}
    if FAILED in statuses:
        return common.EXIT_FAILURE
    return common.EXIT_CAPACITY if statuses == {NO_FIT} else common.EXIT_OK


class _Bar:
    """A progress bar on stderr: one tick a batch size."""

    def __init__(self, progress: Progress, total: int):
        self._progress, self._task = progress, progress.add_task("loading", total=total)

    def begin(self, kv: str, batch: int) -> None:
        self._progress.update(self._task, description=f"{kv}, batch {batch}")

    def advance(self) -> None:
        self._progress.advance(self._task)


@contextmanager
def _progress(total: int) -> Iterator[_Bar]:
    """The bar, gone when the run ends; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_silent = not console.is_terminal or console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=is_silent) as progress:
        yield _Bar(progress, total)
