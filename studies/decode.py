"""Decode throughput at a context: ``python -m studies.decode --shape qwen3-8b --kv bf16,int4 --context 8192``.

A run of prompts that grow by ``--output-len`` tokens to ``--context`` would spend its time on prompts. It is sampled:
KV memory is filled at a few contexts on the way without computing the prompts (``filled.py``), the engine's own decode
steps are timed there, and the step's time is integrated over the output. ``--full`` computes and times everything
instead. Weights and KV together take ``--memory``. The rows' ``method`` is "sampled" or "full run".
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qkv_engine.bench.files import check_writable, write_file
from qkv_engine.bench.forms import FORMATS, format_of
from qkv_engine.bench.plots import PLOT_SUFFIXES, plot_sweep, require_matplotlib
from qkv_engine.bench.report import number, render
from qkv_engine.bench.sweep import FAILED, OK, parse_batches
from qkv_engine.bench.table import PLAIN_WIDTH, Table, from_columns
from qkv_engine.device.memory import free_memory
from qkv_engine.errors import ConfigError, QKVError
from qkv_engine.models.config import DTYPES
from qkv_engine.models.shapes import SHAPES
from qkv_engine.sizes import format_size, parse_size
from qkv_engine.startup import resolve_device

from .decode_run import MAX_BATCH, WARMUP_STEPS, WINDOWS, DecodeRow, Plan, kv_names, run


def with_ratios(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    """``vs_best`` of each row: its speed as a multiple of the best row of the first preset at the same context."""
    best: dict[int, float] = {}
    for row in rows:
        if row.kv == rows[0].kv and row.output_tok_s:
            best[row.context] = max(best.get(row.context, 0.0), row.output_tok_s)
    return [
        replace(row, vs_best=round(row.output_tok_s / best[row.context], 3))
        if row.output_tok_s and row.context in best
        else row
        for row in rows
    ]


def decode_table(rows: Sequence[DecodeRow]) -> Table:
    """The rows for people."""
    columns: dict[str, list[str]] = {
        "context": [f"{row.context:,}" for row in rows],
        "kv": [row.kv for row in rows],
        "batch": [f"{row.batch:,}" for row in rows],
        "tok/s": [number(row.output_tok_s, 0) for row in rows],
        "step ms": [number(row.step_ms, 2) for row in rows],
        "KV used": [_size_of(row.kv_bytes_peak) for row in rows],
        "KV read": [_size_of(row.kv_bytes_read) for row in rows],
        "bits": [number(row.effective_bits, 2) for row in rows],
        "of roofline": [number(row.of_roofline, 3) for row in rows],
        "of limit": [number(row.of_limit, 3) for row in rows],
        f"vs best {rows[0].kv}": [f"{row.vs_best:.2f}x" if row.vs_best else "" for row in rows],
        "demotions": [str(row.demotions or "") for row in rows],
        "method": [row.method for row in rows],
        "status": ["" if row.status == OK else row.status for row in rows],
    }
    ran = next((row for row in rows if row.device), rows[0])
    parts = [ran.model, ran.machine, ran.dtype, f"{ran.output_len} tokens out", f"torch {torch.__version__}"]
    if ran.weight_bytes and ran.kv_bytes_total:
        parts.append(f"weights and KV {format_size(ran.weight_bytes + ran.kv_bytes_total)}")
    notes = [f"{row.kv} {row.batch} at {row.context}: {row.detail}" for row in rows if row.detail]
    spare = ["method", "demotions", "KV used", "KV read", "of roofline", "status", "bits", "step ms", "of limit"]
    return from_columns(" · ".join(part for part in parts if part), columns, notes, spare)


def _size_of(nbytes: int | None) -> str:
    return format_size(nbytes) if nbytes else ""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", required=True, choices=SHAPES, metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    add(
        "--kv",
        default="bf16,int8,int4,kivi-2,auto",
        metavar="LIST",
        help="KV presets and plan files (default: %(default)s)",
    )
    add("--context", default="8192", metavar="LIST", help="tokens of a request at its end (default: %(default)s)")
    add("--output-len", type=int, default=256, metavar="N", help="of them, decoded (default: %(default)s)")
    add("--batch", default="max", metavar="LIST", help='sizes, such as "1,32,max" or "1..max" (default: %(default)s)')
    add("--memory", default="80GiB", metavar="SIZE", help="weights and KV together (default: %(default)s)")
    add("--points", type=int, default=1, metavar="N", help="contexts sampled over the output (default: %(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="steps timed at each (default: %(default)s)")
    add("--full", action="store_true", help="compute the prompts and time every step")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: %(default)s)")
    add("-o", dest="format", choices=FORMATS, default="table", help="form of the rows (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the rows to FILE too, after each of them")
    add("--plot", type=Path, metavar="FILE", help="draw throughput and KV memory, .png, .svg or .pdf, one a context")
    add("-v", "--verbose", action="store_true", help="log what the engine does, on stderr")
    args = parser.parse_args(argv)
    if args.points < 1 or args.steps < WINDOWS:
        parser.error(f"--points must be at least 1, --steps at least {WINDOWS}")
    return args


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan of the options. Raises ``ConfigError``."""
    contexts = parse_batches(args.context)
    room = args.output_len // (2 * args.points)
    if not 2 <= args.output_len < min(contexts):
        raise ConfigError("must be at least 2 and less than any context", field="output_len", value=args.output_len)
    if not args.full and room < 1 + WARMUP_STEPS + args.steps // 2:
        remedy = "Raise --output-len, or lower --points or --steps"
        raise ConfigError(
            f"{args.steps} steps do not fit around a point", field="steps", value=args.steps, remedy=remedy
        )
    parse_batches(args.batch.replace("max", str(MAX_BATCH)))
    memory = parse_size(args.memory, field="memory", free=free_memory(resolve_device(args.device)))
    return Plan(
        shape=args.shape,
        kvs=kv_names(args.kv),
        contexts=contexts,
        batches=args.batch,
        output_len=args.output_len,
        memory=memory,
        points=args.points,
        steps=args.steps,
        full=args.full,
        dtype=args.dtype,
        device=args.device,
        seed=args.seed,
    )


def _check_targets(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for output paths that could not be written after the run."""
    if args.output is not None:
        format_of(args.output, args.format)
        check_writable(args.output, "output")
    if args.plot is not None:
        require_matplotlib()
        if args.plot.suffix.lower() not in PLOT_SUFFIXES:
            remedy = f"Use {', '.join(PLOT_SUFFIXES)}"
            raise ConfigError("its suffix names no known form", field="plot", value=str(args.plot), remedy=remedy)
        check_writable(args.plot, "plot")


def _save(args: argparse.Namespace, rows: list[DecodeRow]) -> None:
    rows = with_ratios(rows)
    if args.output is not None:
        kind = format_of(args.output, args.format)
        write_file(args.output, render(kind, rows, decode_table(rows)).encode())
    contexts = list(dict.fromkeys(row.context for row in rows))
    for context in contexts if args.plot is not None else ():
        name = args.plot if len(contexts) == 1 else args.plot.with_stem(f"{args.plot.stem}-{context}")
        found = [row for row in rows if row.context == context]
        write_file(name, plot_sweep(found, kind=name.suffix.lower().removeprefix(".")))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows and returns the exit code; Ctrl-C prints the rows there are."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR)
    rows: list[DecodeRow] = []
    code = 0
    try:
        _check_targets(args)
        for row in run(make_plan(args)):
            rows.append(row)
            print(_progress(row), file=sys.stderr, flush=True)
            if args.output is not None:
                _save(argparse.Namespace(**{**vars(args), "plot": None}), rows)
    except KeyboardInterrupt:
        code = 130
    except QKVError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    if rows:
        _save(args, rows)
        rows = with_ratios(rows)
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        print(render(args.format, rows, decode_table(rows), width=width), end="")
    return code or int(any(row.status == FAILED for row in rows))


def _progress(row: DecodeRow) -> str:
    what = f"{row.model} {row.kv} context {row.context} batch {row.batch}: "
    if row.status != OK:
        return what + f"{row.status}: {row.detail}"
    share = "" if row.of_roofline is None else f", {row.of_roofline:.3f} of roofline, {row.of_limit:.3f} of limit"
    return what + f"{row.output_tok_s:,.0f} tok/s, step {row.step_ms} ms{share}"


if __name__ == "__main__":
    sys.exit(main())
