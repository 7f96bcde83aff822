"""Microseconds of a decode step by part: ``python -m studies.profile_step --shape qwen3-8b``.

Requests decode at ``--context`` over filled KV memory (``filled.py``). The host's parts are timed in ordinary steps by
clocks around the engine's own calls; a part inside another counts by itself. The device's parts are the kernels that
torch's profiler saw, summed by kind of work, and the time in which none ran; on the CPU its operators. The profiler
slows the host, so the step itself is timed without it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qkv_engine.bench.batches import parse_batches
from qkv_engine.bench.filled import FilledEngine, spread_prompts
from qkv_engine.bench.report import number
from qkv_engine.bench.roofline import Weights, count_weights, limit_seconds
from qkv_engine.bench.sampled import WINDOWS
from qkv_engine.bench.sizing import largest_batch, make_ladder
from qkv_engine.bench.table import Table
from qkv_engine.config import BLOCK_TOKENS, EngineConfig
from qkv_engine.device.memory import free_memory
from qkv_engine.device.runner import Pending
from qkv_engine.errors import ConfigError
from qkv_engine.loading import resolve_device
from qkv_engine.models.config import DTYPES
from qkv_engine.models.loader import resolve_dtype
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import resolve_kv
from qkv_engine.sizes import parse_size

from . import results

STEP, HOST, DEVICE, OPERATORS = "step", "host", "device", "operators"
LIMIT = "limit of a step"
WARMUP_STEPS = 24  # steps in which recurring launches are captured
WAITING, WORKING = "wait for the tokens", "all but waiting"
IDLE = "nothing runs"
LEAST_SHARE = 0.005  # of a step's time

# Kind of work by kernel name: ours exactly, libraries' by a part of the name; the first match counts.
KERNELS = {
    "decode_float_kernel": "attention, 16 bits",
    "decode_int_kernel": "attention, codes",
    "merge_kernel": "attention, merge",
    "linear_sum_kernel": "linear",
    "linear_tile_kernel": "linear",
    "rms_norm_kernel": "norm",
    "rope_kv_write_kernel": "q/k norm, rope, KV write",
    "rope_basis_kv_write_kernel": "q/k norm, rope, KV write",
    "swiglu_kernel": "SwiGLU",
    "sigmoid_gate_kernel": "attention, gate",
    "update_kernel": "tables and plan",
    "place_kernel": "tables and plan",
    "sort_blocks_kernel": "tables and plan",
    "split_items_kernel": "tables and plan",
    "entry_words_kernel": "tables and plan",
    "cos_sin_kernel": "q/k norm, rope, KV write",
    "seal_kernel": "seal and demote",
    "demote_kernel": "seal and demote",
    "copy_kernel": "sampling",
    "edit_kernel": "sampling",
    "limit_kernel": "sampling",
    "peak_kernel": "sampling",
    "weigh_kernel": "sampling",
    "pick_kernel": "sampling",
}
PARTS_OF_NAMES = (
    (("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitkreduce"), "linear"),
    (("memcpy", "memset", "copy_kernel"), "copies"),
    (("argmax", "reduce_kernel"), "sampling"),
    (("index", "gather", "embedding"), "lookups"),
)
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """One part of a step at one batch size: microseconds of a step, and the share of the step's time."""

    model: str
    kv: str
    context: int
    batch: int
    side: str
    part: str
    us: float
    share: float


class Interval(NamedTuple):
    """Microseconds in which something ran."""

    start: float
    end: float


def part_of(kernel: str) -> str:
    """The kind of work of the kernel called ``kernel``."""
    if kernel in KERNELS:
        return KERNELS[kernel]
    name = kernel.lower()
    return next((part for words, part in PARTS_OF_NAMES if any(word in name for word in words)), OTHER)


def covered(intervals: Sequence[Interval]) -> float:
    """Microseconds in which at least one of ``intervals`` ran."""
    total, until = 0.0, float("-inf")
    for start_, end in sorted(intervals):
        total += max(0.0, end - max(start_, until))
        until = max(until, end)
    return total


class Clocks:
    """Seconds spent in named pieces of code; a piece inside another takes its time from it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock, self._stack = clock, list[str]()
        self._since = 0.0

    @contextmanager
    def around(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Times every call of ``owner.name`` as ``part`` while the context lasts."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, name, timed)
        try:
            yield
        finally:
            if isinstance(owner, type):
                setattr(owner, name, method)
            else:
                delattr(owner, name)  # the method of the class holds again

    def _enter(self, part: str) -> None:
        self._lap()
        self._stack.append(part)

    def _leave(self) -> None:
        self._lap()
        self._stack.pop()

    def _lap(self) -> None:
        """Adds the time since the last event to the running part."""
        now = self._clock()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now


def host_parts(core: FilledEngine, steps: int) -> dict[str, float]:
    """Microseconds of the host in a step, by part."""
    clocks, engine = Clocks(), core.core
    with ExitStack() as stack:
        for owner, name, part in (
            (engine, "step", "accept and report"),
            (engine.scheduler, "schedule", "schedule"),
            (engine.runner, "launch_moves", "seal and demote"),
            (engine.runner, "launch", "plan and launch"),
            (Pending, "wait", WAITING),
        ):
            stack.enter_context(clocks.around(owner, name, part))
        core.seconds_per_step(steps)
    found = {part: 1e6 * seconds / steps for part, seconds in clocks.seconds.items()}
    return found | {WORKING: sum(us for part, us in found.items() if part != WAITING)}


def device_parts(core: FilledEngine, steps: int, step_us: float) -> dict[str, float]:
    """Microseconds of the device in a step, by part; on the CPU of torch's operators."""
    on_gpu = core.cache.memory.is_cuda
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        core.seconds_per_step(steps)
    found: defaultdict[str, float] = defaultdict(float)
    if not on_gpu:
        for entry in profiler.key_averages():
            found[entry.key] += entry.self_cpu_time_total / steps
        return dict(found)
    ran = []
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            interval = Interval(event.time_range.start, event.time_range.end)
            found[part_of(event.name)] += (interval.end - interval.start) / steps
            ran.append(interval)
    # Of launches that overlap each counts in full, so the parts may be more than the time in which any ran.
    found[IDLE] = max(0.0, step_us - covered(ran) / steps)
    return dict(found)


def run(args: argparse.Namespace) -> Iterator[ProfileRow]:
    """The parts of a step at each batch size that ``args`` name, the whole step first."""
    kv, config, device = resolve_kv(args.kv), config_from_hf(SHAPES[args.shape]), resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, config, device)
    weights, ladder = count_weights(config, dtype, device), make_ladder(kv, config, dtype)
    nbytes = parse_size(args.memory, field="memory", free=free_memory(device)) - weights.nbytes
    largest = largest_batch(ladder, nbytes, args.context)
    batches = parse_batches(args.batch, largest)
    if max(batches) > largest:
        remedy = "Lower --batch or --context, or raise --memory"
        raise ConfigError(f"{largest} fit", field="batch", value=max(batches), remedy=remedy)
    options = EngineConfig(
        model=args.shape,
        load_format="random",
        kv=kv,
        kv_memory=nbytes,
        prefix_caching=False,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.context,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(2048, *batches),
    )
    with FilledEngine(options) as core:
        for batch in batches:
            yield from _parts(core, args, batch, weights)


def _parts(core: FilledEngine, args: argparse.Namespace, batch: int, weights: Weights) -> Iterator[ProfileRow]:
    piece = -(-args.steps // WINDOWS)
    steps = WARMUP_STEPS + WINDOWS * piece + 2 * args.steps
    core.begin(spread_prompts(batch, args.context - steps - BLOCK_TOKENS // 2, args.context - 1 - steps), args.context)
    core.seconds_per_step(WARMUP_STEPS)
    # The median piece, so that a graph captured meanwhile does not count.
    step_us = 1e6 * median(core.seconds_per_step(piece) for _ in range(WINDOWS))
    limit = 1e6 * limit_seconds(weights, batch, core.kv_nbytes_read())
    on_gpu = core.cache.memory.is_cuda
    parts = [(STEP, "all", step_us)] + ([(STEP, LIMIT, limit)] if on_gpu else [])
    for side, found in (
        (HOST, host_parts(core, args.steps)),
        (DEVICE if on_gpu else OPERATORS, device_parts(core, args.steps, step_us)),
    ):
        parts += [(side, part, us) for part, us in sorted(found.items(), key=lambda item: -item[1])]
    for side, part, us in parts:
        yield ProfileRow(
            model=args.shape,
            kv=args.kv,
            context=args.context,
            batch=batch,
            side=side,
            part=part,
            us=round(us, 2),
            share=round(us / step_us, 4),
        )
    core.end()


def profile_table(rows: Sequence[ProfileRow]) -> Table:
    """A line a part, a column a batch size; parts below ``LEAST_SHARE`` of every step are left out."""
    batches = list(dict.fromkeys(row.batch for row in rows))
    found = {(row.side, row.part, row.batch): row for row in rows}
    largest: dict[tuple[str, str], float] = {}
    for row in rows:
        largest[row.side, row.part] = max(largest.get((row.side, row.part), 0.0), row.share)
    order = [STEP, HOST, DEVICE, OPERATORS]
    keys = sorted(
        (key for key, share in largest.items() if share >= LEAST_SHARE), key=lambda k: (order.index(k[0]), -largest[k])
    )
    cells = []
    for side, part in keys:
        line = [side, part]
        for batch in batches:
            cell = found.get((side, part, batch))
            line += [number(cell.us, 1), f"{cell.share:.1%}"] if cell else ["", ""]
        cells.append(line)
    headers = ["side", "part", *(header for batch in batches for header in (f"us, batch {batch}", "share"))]
    first = rows[0]
    title = f"{first.model} · {first.kv} · context {first.context:,} · a decode step, torch {torch.__version__}"
    return Table(title, headers, cells, [], text=("part",))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ``SystemExit`` 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.profile_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", required=True, choices=SHAPES, metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    add("--kv", default="int4", metavar="NAME", help="KV preset (default: %(default)s)")
    add("--batch", default="1,32", metavar="LIST", help='sizes; "max" is the largest that fits (default: %(default)s)')
    add("--context", type=int, default=8192, metavar="N", help="tokens of each request (default: %(default)s)")
    add("--memory", default="80GiB", metavar="SIZE", help="weights and KV together (default: %(default)s)")
    add("--steps", type=int, default=40, metavar="N", help="steps of each measurement (default: %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    if args.steps < 1 or args.context < WARMUP_STEPS + 3 * args.steps + WINDOWS + 2:
        parser.error("--steps must be at least 1 and few for the context")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    rows, code = results.collect(run(args))
    if rows:
        results.deliver(args, rows, profile_table(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
