"""Free KV memory while blocks stand below the first rung, by its size: ``python -m studies.free_memory``.

Books of the demo model without memory or device: nothing is computed, and all sampled tokens are alike. Requests always
wait; their prompts and answers are of half to one and a half times the lengths of the table. Shares are means over the
steps in which any block stands below the first rung, the first quarter of all steps left out.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qkv_engine.bench.report import number
from qkv_engine.bench.sizing import make_ladder
from qkv_engine.bench.table import Table
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.slabs import make_tables
from qkv_engine.models.registry import config_from_hf
from qkv_engine.models.shapes import SHAPES
from qkv_engine.presets import PRESETS
from qkv_engine.request import FinishReason, Request, SamplingParams
from qkv_engine.scheduler import Scheduler
from qkv_engine.sizes import format_size, parse_size

from . import results

MAX_RUNNING = 4096
WAITING = 64  # requests, in every step
BUDGET = 65_536  # tokens of a step: the largest memory is kept full, too
SIZES = ("12MiB", "24MiB", "48MiB", "96MiB", "384MiB", "1.5GiB", "12GiB")
LENGTHS = ((124, 199), (400, 100), (1000, 300))  # of prompts and answers


@dataclass(frozen=True)
class FreeRow:
    """One load on one memory; shares of it in percent, None where no block ever stepped down."""

    kv_memory: str
    input_len: int
    output_len: int
    kv: str
    steps: int
    mean_running: float
    demotions: int
    low_steps: int
    free_percent: float | None
    reserve_percent: float
    most_demotions: int


def measure(nbytes: int, lengths: tuple[int, int], steps: int, kv: str, seed: int = 0) -> FreeRow:
    """Runs ``steps`` steps, the first quarter of which do not count."""
    rng, (prompt, answer) = random.Random(seed), lengths
    ladder = make_ladder(PRESETS[kv], config_from_hf(SHAPES["demo"]), torch.bfloat16)
    tables = make_tables(ladder.spec, nbytes)
    space = KVManager(tables, None)
    scheduler = Scheduler(space, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=BUDGET)
    arena, free, running, most, serial = tables.arena, list[float](), list[int](), 0, 0
    for step in range(steps):
        while len(scheduler.waiting) < WAITING:
            length = rng.randint(answer // 2, answer * 3 // 2)
            ids = [serial, *[7] * rng.randint(prompt // 2, prompt * 3 // 2)]
            scheduler.add(
                Request(f"r{serial}", ids, SamplingParams(max_tokens=length), length, floor=space.num_rungs - 1)
            )
            serial += 1
        before = tables.store.num_demotions.total()
        batch = scheduler.schedule()
        tables.store.take_fresh()
        tables.store.waves.clear()
        if step >= steps // 4:
            most = max(most, tables.store.num_demotions.total() - before)
            running.append(len(scheduler.running))
            if any(count for rung, count in tables.main.num_blocks.items() if rung > 0):
                free.append(1 - arena.used_nbytes / nbytes)
        for item in batch.items:
            scheduler.computed(item)
            if item.samples:
                scheduler.append_token(item.request, 7)
                if item.request.num_output_tokens == item.request.max_tokens:
                    scheduler.finish(item.request, FinishReason.LENGTH)
    share = 100 * sum(free) / len(free) if free else None
    mean = sum(running) / len(running)
    return FreeRow(
        format_size(nbytes), prompt, answer, kv, steps, mean, tables.store.num_demotions.total(), len(free), share,
        100 * arena.reserve_nbytes / nbytes, most,
    )  # fmt: skip


def free_table(rows: Sequence[FreeRow]) -> Table:
    """A line a load."""
    headers = [
        "KV memory",
        "in",
        "out",
        "kv",
        "running",
        "demotions",
        "steps",
        "below 16 bits",
        "free %",
        "reserve %",
        "most a step",
    ]
    cells = [
        [
            *(row.kv_memory, str(row.input_len), str(row.output_len), row.kv, number(row.mean_running, 1)),
            *(number(value, 0) for value in (row.demotions, row.steps, row.low_steps)),
            *(number(value, 1) for value in (row.free_percent, row.reserve_percent)),
            str(row.most_demotions),
        ]
        for row in rows
    ]
    return Table("free KV memory while any block stands below the first rung", headers, cells, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.free_memory", description=__doc__)
    parser.add_argument("--size", action="append", metavar="SIZE", help="KV memory; may be repeated")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--kv", action="append", metavar="PRESET", help="may be repeated (default: auto)")
    results.add_options(parser)
    args = parser.parse_args(argv)
    sizes = [parse_size(text, field="size", free=2**60) for text in args.size or SIZES]
    loads = [(size, lengths, kv) for lengths in LENGTHS for size in sizes for kv in args.kv or ("auto",)]
    rows, code = results.collect(measure(size, lengths, args.steps, kv) for size, lengths, kv in loads)
    if rows:
        results.deliver(args, rows, free_table(rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
