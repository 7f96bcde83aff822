"""Decode throughput at a context: ``python -m qkv_engine.bench.decode --shape qwen3-8b --kv bf16,int4 --context 8192``.

A run of prompts that grow by ``--output-len`` tokens to ``--context`` would spend its time on prompts. It is sampled:
KV memory is filled at a few contexts on the way without computing the prompts (``filled.py``), the engine's own decode
steps are timed there, and the step's time is integrated over the output. ``--full`` computes and times everything
instead. Weights and KV together take ``--memory``. The rows' ``method`` says which it was.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkv_engine.config import EngineConfig, format_size, parse_size, resolve_kv
from qkv_engine.errors import CapacityError, ConfigError, QKVError
from qkv_engine.memory import free_memory
from qkv_engine.models.config import DTYPES, ModelConfig
from qkv_engine.models.shapes import SHAPES
from qkv_engine.startup import Started, resolve_device, start

from .filled import FilledCore, spread_prompts
from .plots import plot_sweep, require_matplotlib
from .report import FORMATS, PLAIN_WIDTH, SUFFIXES, Table, number, render, write_file
from .roofline import Weights, bytes_seconds, count_weights, limit_seconds
from .sizing import largest_batch, make_ladder
from .sweep import FAILED, NO_FIT, OK, Row, parse_batches

SAMPLED, FULL = "sampled", "full run"
WARMUP_STEPS, WINDOWS = 4, 3  # before the timed steps, and pieces in which these are timed
FULL_WINDOWS = 16  # pieces of a full run
MAX_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class DecodeRow(Row):
    """One batch that decodes to ``context`` tokens a request: the mean over ``output_len`` tokens of each.

    ``step_ms`` is the mean step, ``steps`` were timed at ``points`` contexts, and the slowest and the fastest piece
    give ``output_tok_s_min`` and ``_max``. ``of_roofline`` compares the step with the time its bytes take (weights and
    KV, 4.3e12 B/s), ``of_limit`` counts matrix products by their arithmetic where that takes longer; on a GPU only.
    ``vs_best`` is the ratio to the first preset's best row of this context.
    """

    context: int
    method: str
    points: int = 0
    steps: int = 0
    step_ms: float | None = None
    weight_bytes: int = 0
    kv_bytes_read: int | None = None
    of_roofline: float | None = None
    of_limit: float | None = None
    vs_best: float | None = None


class Plan(NamedTuple):
    """What to measure, in tokens; ``batches`` may say "max", the largest batch that fits."""

    shape: str
    kvs: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: str
    output_len: int
    memory: int
    points: int
    steps: int
    full: bool
    dtype: str
    device: str
    seed: int


class Window(NamedTuple):
    """Steps timed together: how many, seconds each, and the bytes of KV that each read."""

    steps: int
    seconds: float
    kv_nbytes: float


class Subject(NamedTuple):
    """What a preset is measured on: memory for KV, and sizes by context."""

    kv: str
    kv_nbytes: int
    largest: dict[int, int]
    batches: dict[int, tuple[int, ...]]


def run(plan: Plan) -> Iterator[DecodeRow]:
    """Yields a row as soon as it is measured. Raises ``ConfigError``; every other failure is a row."""
    config, device = ModelConfig.from_hf(SHAPES[plan.shape]), resolve_device(plan.device)
    dtype = _dtype(plan, config, device)
    weights = count_weights(config, dtype)
    for kv in plan.kvs:
        subject = _size(plan, kv, config, dtype, plan.memory - weights.nbytes)
        for context in plan.contexts:
            for batch in subject.batches[context]:
                if batch > subject.largest[context]:
                    detail = f"{subject.largest[context]} requests fit"
                    yield _row(plan, kv, context, batch, status=NO_FIT, detail=detail)
        yield from _measured(plan, subject, weights)


def _measured(plan: Plan, subject: Subject, weights: Weights) -> Iterator[DecodeRow]:
    """The rows that fit, on one engine as long as it works."""
    sizes = [(c, b) for c in plan.contexts for b in subject.batches[c] if b <= subject.largest[c]]
    while sizes:
        started = None
        try:
            started = start(_engine_config(plan, subject, max(batch for _, batch in sizes)))
            core = FilledCore(started, fill=not plan.full)
            while sizes:
                context, batch = sizes[0]
                row = _measure(plan, core, subject.kv, context, batch, weights)
                sizes.pop(0)
                yield _described(row, started)
        except CapacityError as error:
            yield from (_row(plan, subject.kv, c, b, status=NO_FIT, detail=str(error)) for c, b in sizes)
            return
        except ConfigError:
            raise
        except (QKVError, RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
            context, batch = sizes.pop(0)
            detail = f"{type(error).__name__}: {error}"
            yield _row(plan, subject.kv, context, batch, status=FAILED, detail=detail)
        finally:
            if started is not None:
                _free(started)


def _measure(plan: Plan, core: FilledCore, kv: str, context: int, batch: int, weights: Weights) -> DecodeRow:
    core.end()
    if plan.full:
        pieces = [_full_run(core, context, batch, plan.output_len)]
    else:
        pieces = [_sample(core, at, context, batch, plan.steps) for at in sample_contexts(context, plan)]
    row = _summary(plan, core, kv, context, batch, pieces, weights)
    core.end()
    return row


def sample_contexts(context: int, plan: Plan) -> list[int]:
    """Where steps are timed: the middles of ``points`` equal parts of the output."""
    part = plan.output_len / plan.points
    return [round(context - plan.output_len + (i + 0.5) * part) for i in range(plan.points)]


def _sample(core: FilledCore, at: int, context: int, batch: int, steps: int) -> list[Window]:
    """Steps of ``batch`` requests around the context ``at``; each request has room for ``context`` tokens."""
    core.end()
    before = 1 + WARMUP_STEPS + steps // 2  # the first step is taken while the batch starts
    longest = context - 1 - WARMUP_STEPS - steps
    core.start(spread_prompts(batch, at - before, longest), context)
    core.seconds_per_step(WARMUP_STEPS)
    sizes = [steps * (i + 1) // WINDOWS - steps * i // WINDOWS for i in range(WINDOWS)]
    return [_window(core, size) for size in sizes if size]


def _full_run(core: FilledCore, context: int, batch: int, output_len: int) -> list[Window]:
    """All steps in which the whole batch decodes, after its prompts were computed."""
    core.start([context - output_len] * batch, context)
    left = min(r.max_tokens - r.num_output_tokens for r in core.running) - 1
    if left < 1:
        raise QKVError("requests ended before the last one began", remedy="Raise --output-len")
    sizes = [left * (i + 1) // FULL_WINDOWS - left * i // FULL_WINDOWS for i in range(FULL_WINDOWS)]
    return [_window(core, size) for size in sizes if size]


def _window(core: FilledCore, steps: int) -> Window:
    before = core.kv_nbytes_read()
    seconds = core.seconds_per_step(steps)
    return Window(steps, seconds, (before + core.kv_nbytes_read()) / 2)


def _summary(
    plan: Plan, core: FilledCore, kv: str, context: int, batch: int, pieces: list[list[Window]], weights: Weights
) -> DecodeRow:
    """The row of some points of the run, of equal weight, with the windows of each."""
    windows = [window for piece in pieces for window in piece]
    seconds = statistics.fmean(_mean([w.seconds for w in piece], piece) for piece in pieces)
    kv_read = statistics.fmean(_mean([w.kv_nbytes for w in piece], piece) for piece in pieces)
    on_gpu = core.cache.memory.is_cuda
    # Within a point windows differ by chance, between points by design: the spread is that of the points' means.
    slow = statistics.fmean(max(w.seconds for w in piece) for piece in pieces)
    fast = statistics.fmean(min(w.seconds for w in piece) for piece in pieces)
    peak, held = core.cache.peak, core.cache.fullest
    nbytes = {name: peak[name] for name in ("codes", "meta", "dense")}
    return _row(
        plan,
        kv,
        context,
        batch,
        status=OK,
        repeats=len(pieces[0]),
        points=len(pieces),
        steps=sum(w.steps for w in windows),
        step_ms=round(1e3 * seconds, 4),
        output_tok_s=round(batch / seconds, 2),
        output_tok_s_min=round(batch / slow, 2),
        output_tok_s_max=round(batch / fast, 2),
        decode_tok_s=round(batch / seconds, 2),
        tpot_ms=round(1e3 * seconds, 4),
        kv_bytes_total=core.cache.nbytes,
        kv_bytes_peak=sum(nbytes.values()),
        **{f"kv_bytes_{name}": value for name, value in nbytes.items()},
        effective_bits=round(8 * (held["codes"] + held["meta"] + held["dense"]) / held["elements"], 3),
        max_running=batch,
        demotions=sum(core.cache.tables.num_demotions.values()),
        preemptions=core.core.scheduler.num_preemptions,
        weight_bytes=weights.nbytes,
        kv_bytes_read=round(kv_read),
        of_roofline=round(bytes_seconds(weights, kv_read) / seconds, 4) if on_gpu else None,
        of_limit=round(limit_seconds(weights, batch, kv_read) / seconds, 4) if on_gpu else None,
    )


def _mean(values: list[float], windows: list[Window]) -> float:
    return sum(v * w.steps for v, w in zip(values, windows, strict=True)) / sum(w.steps for w in windows)


def _row(plan: Plan, kv: str, context: int, batch: int, *, status: str, **values: Any) -> DecodeRow:
    return DecodeRow(
        model=plan.shape,
        kv=kv,
        batch=batch,
        input_len=context - plan.output_len,
        output_len=plan.output_len,
        context=context,
        method=FULL if plan.full else SAMPLED,
        status=status,
        **values,
    )


def _described(row: DecodeRow, started: Started) -> DecodeRow:
    return replace(row, device=str(started.device), dtype=str(started.dtype).removeprefix("torch."))


def _size(plan: Plan, kv: str, config: ModelConfig, dtype: torch.dtype, kv_nbytes: int) -> Subject:
    """How many requests of each context fit in ``kv_nbytes``, and which batches are wanted."""
    ladder = make_ladder(resolve_kv(kv), config, dtype)
    largest = {c: min(MAX_BATCH, largest_batch(ladder, kv_nbytes, c)) for c in plan.contexts}
    batches = {c: parse_batches(plan.batches.replace("max", str(max(1, n)))) for c, n in largest.items()}
    return Subject(kv, kv_nbytes, largest, batches)


def _engine_config(plan: Plan, subject: Subject, batch: int) -> EngineConfig:
    return EngineConfig(
        model=plan.shape,
        load_format="random",
        kv=resolve_kv(subject.kv),
        kv_memory=subject.kv_nbytes,
        prefix_caching=False,
        dtype=plan.dtype,
        device=plan.device,
        max_model_len=max(plan.contexts) if subject.largest[max(plan.contexts)] else None,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch),
        seed=plan.seed,
    )


def _dtype(plan: Plan, config: ModelConfig, device: torch.device) -> torch.dtype:
    if plan.dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    return DTYPES[plan.dtype]


def _free(started: Started) -> None:
    """Gives model and KV memory back, for the next preset."""
    started.core.free()
    gc.collect()
    if started.device.type == "cuda":
        torch.cuda.empty_cache()


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
        "batch": [str(row.batch) for row in rows],
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
    shown = {header: column for header, column in columns.items() if any(column)}
    ran = next((row for row in rows if row.device), rows[0])
    parts = [ran.model, ran.device, ran.dtype, f"{ran.output_len} tokens out", f"torch {torch.__version__}"]
    if ran.weight_bytes and ran.kv_bytes_total:
        parts.append(f"weights and KV {format_size(ran.weight_bytes + ran.kv_bytes_total)}")
    notes = [f"{row.kv} {row.batch} at {row.context}: {row.detail}" for row in rows if row.detail]
    cells = [list(row) for row in zip(*shown.values(), strict=True)]
    return Table(" · ".join(part for part in parts if part), list(shown), cells, notes)


def _size_of(nbytes: int | None) -> str:
    return format_size(nbytes) if nbytes else ""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m qkv_engine.bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", required=True, choices=SHAPES, metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    add("--kv", default="bf16,int8,int4,kivi-2,auto", metavar="LIST", help="KV presets (default: %(default)s)")
    add("--context", default="8192", metavar="LIST", help="tokens of a request at its end (default: %(default)s)")
    add("--output-len", type=int, default=256, metavar="N", help="of them, decoded (default: %(default)s)")
    add("--batch", default="max", metavar="LIST", help='sizes, such as "1,32,max" or "1..max" (default: %(default)s)')
    add("--memory", default="80GiB", metavar="SIZE", help="weights and KV together (default: %(default)s)")
    add("--points", type=int, default=1, metavar="N", help="contexts sampled over the output (default: %(default)s)")
    add("--steps", type=int, default=48, metavar="N", help="steps timed at each (default: %(default)s)")
    add("--full", action="store_true", help="compute the prompts and time every step")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: %(default)s)")
    add("-o", dest="format", choices=FORMATS, default="table", help="form of the rows (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the rows to FILE too, after each of them")
    add("--plot", type=Path, metavar="FILE.png", help="draw throughput and KV memory, one picture a context")
    add("-v", "--verbose", action="store_true", help="log what the engine does, on stderr")
    args = parser.parse_args(argv)
    if args.points < 1 or args.steps < WINDOWS:
        parser.error(f"--points must be at least 1, --steps at least {WINDOWS}")
    return args


def make_plan(args: argparse.Namespace) -> Plan:
    """What ``args`` ask for. Raises ``ConfigError``."""
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
        kvs=tuple(dict.fromkeys(resolve_kv(name.strip()).name for name in args.kv.split(","))),
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


def _save(args: argparse.Namespace, rows: list[DecodeRow]) -> None:
    rows = with_ratios(rows)
    if args.output is not None:
        kind = SUFFIXES.get(args.output.suffix.lower(), args.format)
        write_file(args.output, render(kind, rows, decode_table(rows)).encode())
    contexts = list(dict.fromkeys(row.context for row in rows))
    for context in contexts if args.plot is not None else ():
        name = args.plot if len(contexts) == 1 else args.plot.with_stem(f"{args.plot.stem}-{context}")
        write_file(name, plot_sweep([row for row in rows if row.context == context]))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows and returns the exit code; Ctrl-C prints the rows there are."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR)
    rows: list[DecodeRow] = []
    code = 0
    try:
        if args.plot is not None:
            require_matplotlib()
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
