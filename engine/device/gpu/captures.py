"""Shapes of steps that an engine's limits allow, captured before its first request."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from qkv_engine.kernels.paged_decode.split import SHORT_ITEM

from ...kv.table import BlockTables
from ..memory import free_memory
from .attention import GpuAttentionPlanner
from .graphs import MAX_GRAPHS
from .mixed import MAX_CHUNK_TOKENS, MixedShape, least_tiles, padded_chunk, padded_decodes
from .steps import DecodeShape, GpuSteps, padded_batch

StepShape = DecodeShape | MixedShape
GROWTH = 2**0.25  # between two numbers of blocks that are looked at, fewer than the octave between most shapes


class Captured(NamedTuple):
    """The number of steps captured, the seconds that took, and the bytes of device memory that the steps take."""

    number: int
    seconds: float
    nbytes: int


def capture_all(
    steps: GpuSteps,
    capture: Callable[[StepShape], None],
    tables: BlockTables,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> Captured:
    """Captures every shape of a step of up to ``max_num_seqs`` requests, with a bar on stderr if that is a terminal.

    Steps over many blocks that requests share are captured when they are met, and so are those with many short chunks,
    and those beyond the most graphs that are kept.
    """
    start, before = time.monotonic(), free_memory(steps.device)
    shapes = list(all_shapes(steps.planner, tables, max_num_seqs, max_model_len, max_num_batched_tokens))[:MAX_GRAPHS]
    shapes.sort(key=lambda shape: shape.num_rows, reverse=True)  # smaller steps find room in the memory of larger ones
    for shape in _with_bar(shapes):
        capture(shape)
    return Captured(len(shapes), time.monotonic() - start, before - free_memory(steps.device))


def all_shapes(
    planner: GpuAttentionPlanner,
    tables: BlockTables,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> Iterator[StepShape]:
    """Shapes of steps, each once: those of single tokens first, then those with chunks of prompts."""
    shapes = planner.shapes
    for batch, numbers in groupby(range(1, max_num_seqs + 1), padded_batch):
        for bounds in shapes.all_bounds(batch, block_counts(tables, batch, max_model_len), list(numbers)):
            yield DecodeShape(batch, bounds)
    most = min(MAX_CHUNK_TOKENS, max_num_batched_tokens)
    sizes = sorted({padded_chunk(n) for n in range(1, most + 1)})
    no_blocks = [0] * len(tables.group.rungs)
    for batch in sorted({padded_decodes(n) for n in range(max_num_seqs)}):
        beside = shapes.split(no_blocks, batch, batch, beside_chunks=True)[1] if batch else None
        for size in sizes:
            yield MixedShape(batch, beside, size, least_tiles(size, planner.tile_tokens))


def block_counts(tables: BlockTables, batch: int, max_model_len: int) -> Iterator[tuple[int, ...]]:
    """Numbers of blocks by rung that ``batch`` requests may hold together if they share none.

    All stand on the first rung, or all but a few, short ones or not, or half of them; the others stand on the last
    rung, or evenly on all but the first.
    """
    num_others = len(tables.group.rungs) - 1
    most = batch * (tables.blocks_for(max_model_len) + 2)  # sinks, and blocks of requests that are not in the step
    total = batch
    while total <= most:
        found = {(total, *[0] * num_others)}
        for first in (batch, SHORT_ITEM * batch, SHORT_ITEM * batch + 1, total // 2):
            if num_others and 0 < first < total:
                found |= {(first, *_last(total - first, num_others)), (first, *_evenly(total - first, num_others))}
        # A sink or an open block takes less than a block.
        yield from (counts for counts in found if _fits([counts[0] - batch, *counts[1:]], tables))
        total = total + 1 if total == most else min(most, math.ceil(total * GROWTH))


def _last(number: int, num_rungs: int) -> list[int]:
    return [0] * (num_rungs - 1) + [number]


def _evenly(number: int, num_rungs: int) -> list[int]:
    return [(number + i) // num_rungs for i in range(num_rungs)]


def _fits(counts: list[int], tables: BlockTables) -> bool:
    return sum(count * tables.sizes[rung] for rung, count in enumerate(counts)) <= tables.arena.nbytes


def _with_bar(shapes: list[StepShape]) -> Iterable[StepShape]:
    if not sys.stderr.isatty():
        return shapes
    from rich.console import Console
    from rich.progress import track

    return track(shapes, "capturing steps", console=Console(stderr=True), transient=True)
