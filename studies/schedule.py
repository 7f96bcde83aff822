"""Cost of the scheduler with thousands of requests: ``python -m studies.schedule --running 4096``.

Books of a small model without memory or device: nothing is computed, and all sampled tokens are alike. Each row is one
load, timed call by call: ``Scheduler.schedule`` for steps, ``Scheduler.finish`` where requests are cancelled. Times are
those of the processor, which other programs do not lengthen much.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from qkv_engine.bench.report import number
from qkv_engine.bench.sizing import make_ladder
from qkv_engine.bench.table import Table
from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.slabs import make_tables
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS
from qkv_engine.request import FinishReason, Request, SamplingParams
from qkv_engine.scheduler import ScheduledBatch, Scheduler

from . import results

ROOMY = 2**40  # bytes of KV memory, more than any load fills
STEPS = BLOCK_TOKENS  # steps of a steady load, in which each request begins one block
PROMPT = 16  # tokens
BUDGET = 8192  # tokens of a step
CHURN = 16  # requests that end, and that arrive, in a step


@dataclass(frozen=True)
class LoadRow:
    """Times of one load's calls in milliseconds."""

    load: str
    running: int
    calls: int
    least_ms: float
    median_ms: float
    most_ms: float
    total_ms: float


class Bench:
    """A scheduler over tables alone, without memory or device."""

    def __init__(self, running: int, kv: str = "auto", *, nbytes: int = ROOMY, quota: float | None = None):
        ladder = make_ladder(PRESETS[kv], config_from_hf(SHAPES["demo"]), torch.bfloat16)
        tables = make_tables(ladder.spec, nbytes)
        self.space = KVManager(tables, PrefixCache(tables, "demo", quota=quota), quota)
        self.scheduler = Scheduler(self.space, max_num_seqs=running, max_num_batched_tokens=BUDGET)
        self._num_added = 0

    def add(self, count: int, prompt: int = PROMPT, *, spread: int = 1, length: int = 4096, **params: Any) -> None:
        """Adds requests whose prompts begin differently and are up to ``spread`` tokens longer than ``prompt``."""
        for serial in range(self._num_added, self._num_added + count):
            ids = [serial % 997, serial // 997, *[7] * (prompt - 2 + serial * 37 % spread)]
            floor = self.space.num_rungs - 1
            self.scheduler.add(Request(f"r{serial}", ids, SamplingParams(**params), length, floor=floor))
        self._num_added += count

    def start(self) -> None:
        """Steps until all requests decode."""
        while self.scheduler.waiting or any(
            r.num_computed_tokens < r.num_prompt_tokens for r in self.scheduler.running
        ):
            self.step()

    def step(self) -> float:
        """One step; returns the seconds of its scheduling."""
        started = time.thread_time()
        batch = self.scheduler.schedule()
        seconds = time.thread_time() - started
        self._answer(batch)
        return seconds

    def _answer(self, batch: ScheduledBatch) -> None:
        self.scheduler.space.tables.store.take_fresh()  # type: ignore[attr-defined]
        self.scheduler.space.tables.store.waves.clear()  # type: ignore[attr-defined]
        for item in batch.items:
            self.scheduler.computed(item)
            if item.samples:
                self.scheduler.append_token(item.request, 7)

    def cancel(self, count: int) -> list[float]:
        """Ends requests of all ages; returns the seconds of each call."""
        times, requests = [], list(self.scheduler.requests.values())
        for request in requests[:: len(requests) // count][:count]:
            started = time.thread_time()
            self.scheduler.finish(request, FinishReason.ABORT)
            times.append(time.thread_time() - started)
        return times


def decode(running: int, kv: str = "auto", **params: Any) -> Iterator[float]:
    """Seconds a step while all requests decode, each at another place in its block."""
    bench = Bench(running, kv)
    bench.add(running, spread=BLOCK_TOKENS, **params)
    bench.start()
    yield from (bench.step() for _ in range(STEPS))


def in_step(running: int) -> Iterator[float]:
    """Seconds a step while all decode at the same place, so that all begin a block in one step."""
    bench = Bench(running)
    bench.add(running)
    bench.start()
    yield from (bench.step() for _ in range(STEPS))


def arrive(running: int) -> Iterator[float]:
    """Seconds a step while all arrive at once, until the last has started."""
    bench = Bench(running)
    bench.add(running)
    while bench.scheduler.waiting:
        yield bench.step()


def churn(running: int) -> Iterator[float]:
    """Seconds a step while some end and as many arrive: slabs are left half empty."""
    bench = Bench(running)
    bench.add(running, 4 * BLOCK_TOKENS, spread=BLOCK_TOKENS)
    bench.start()
    for _ in range(STEPS):
        bench.cancel(CHURN)
        bench.add(CHURN)
        yield bench.step()


def blocked(running: int) -> Iterator[float]:
    """Seconds a step while memory is promised to the running requests and as many wait."""
    probe = Bench(running)
    need = running * probe.scheduler.space.tables.spec.main.blocks_for(PROMPT + 1024) * 2**18  # type: ignore[attr-defined]
    bench = Bench(2 * running, nbytes=need)
    bench.add(2 * running, max_tokens=1024, length=1024)
    for _ in range(16):
        bench.step()
    yield from (bench.step() for _ in range(STEPS))


def tenants(running: int) -> Iterator[float]:
    """Seconds a step while each tenant runs a request and waits with one that is as large as its quota."""
    bench = Bench(2 * running, quota=1e-4)
    capacity = bench.space.capacities[-1]
    for tenant in range(running):
        bench.add(1, length=1024, max_tokens=1024, tenant=f"t{tenant}")
    bench.start()
    for tenant in range(running):
        bench.add(1, length=capacity - PROMPT, max_tokens=capacity - PROMPT, tenant=f"t{tenant}")
    yield from (bench.step() for _ in range(32))


def short(running: int) -> Iterator[float]:
    """Seconds a step while memory is short: blocks step down in every step."""
    bench = Bench(running, nbytes=running * 4 * 2**20)
    bench.add(running, 3 * BLOCK_TOKENS, spread=BLOCK_TOKENS, max_tokens=300, length=300)
    bench.start()
    yield from (bench.step() for _ in range(STEPS))


def prompt(running: int) -> Iterator[float]:
    """Seconds a step of a prompt of 100,000 tokens beside the others."""
    bench = Bench(running + 1)
    bench.add(running, spread=BLOCK_TOKENS)
    bench.start()
    bench.add(1, 100_000)
    while bench.scheduler.running.last.num_computed_tokens < 100_000:
        yield bench.step()


def cancel(running: int) -> Iterator[float]:
    """Seconds a call while all requests are cancelled, one a call."""
    bench = Bench(running)
    bench.add(running, 4 * BLOCK_TOKENS, spread=BLOCK_TOKENS)
    bench.start()
    yield from bench.cancel(running)


LOADS: dict[str, Callable[[int], Iterator[float]]] = {
    "decode": decode,
    "decode, max_tokens named": lambda running: decode(running, length=1024, max_tokens=1024),
    "decode, int4": lambda running: decode(running, "int4"),
    "decode, blocks begin together": in_step,
    "arrive together": arrive,
    f"{CHURN} end, {CHURN} arrive": churn,
    "as many wait": blocked,
    "tenants over quota wait": tenants,
    "memory is short": short,
    "prompt of 100,000": prompt,
    "cancel": cancel,
}


def measure(load: str, running: int) -> LoadRow:
    """Runs one load with the collector off, which would count its own passes."""
    gc.collect()
    gc.disable()
    try:
        times = [1e3 * seconds for seconds in LOADS[load](running)]
    finally:
        gc.enable()
    return LoadRow(load, running, len(times), min(times), median(times), max(times), sum(times))


def load_table(rows: Sequence[LoadRow]) -> Table:
    """A line a load."""
    headers = ["load", "running", "calls", "least ms", "median ms", "most ms", "total ms"]
    cells = [
        [row.load, str(row.running), str(row.calls)]
        + [number(value, 3) for value in (row.least_ms, row.median_ms, row.most_ms, row.total_ms)]
        for row in rows
    ]
    return Table("scheduling, by load", headers, cells, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.schedule", description=__doc__)
    parser.add_argument("--running", type=int, default=4096, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument("--load", action="append", choices=LOADS, help="only this one; may be repeated")
    results.add_options(parser)
    args = parser.parse_args(argv)
    rows, code = results.collect(measure(load, args.running) for load in args.load or LOADS)
    if rows:
        results.deliver(args, rows, load_table(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
