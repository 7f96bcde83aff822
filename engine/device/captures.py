"""Shapes of steps that an engine's limits allow, captured before its first request."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from qkv_engine.kernels.paged_decode.split import SHORT_ITEM, Bounds

from ..config import BLOCK_TOKENS
from ..kv.attention_gpu import GpuAttentionPlanner
from ..kv.table import BlockTables
from .gpu_steps import DecodeShape, GpuSteps, padded_batch
from .graphs import MAX_GRAPHS
from .memory import free_memory
from .mixed_steps import MAX_CHUNK_TOKENS, MixedShape, least_tiles, padded_chunk, padded_decodes

GROWTH = 2**0.125  # between two numbers of blocks that are looked at; with fewer, a shape might be missed


class Captured(NamedTuple):
    """How many steps were captured, in how many seconds, and the bytes of device memory that they take."""

    number: int
    seconds: float
    nbytes: int


def capture_all(steps: GpuSteps, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int) -> Captured:
    """Captures every shape of a step of up to ``max_num_seqs`` requests, with a bar on stderr if that is a terminal.

    Steps whose blocks are spread over the rungs in some rare way are captured when they are met, and so are those
    beyond the most graphs that are kept.
    """
    start, before = time.monotonic(), free_memory(steps.device)
    shapes = list(all_shapes(steps, max_num_seqs, max_model_len, max_num_batched_tokens))[:MAX_GRAPHS]
    shapes.sort(key=lambda shape: shape.num_rows, reverse=True)  # smaller steps find room in the memory of larger ones
    for shape in _with_bar(shapes):
        steps.capture(shape)
    return Captured(len(shapes), time.monotonic() - start, before - free_memory(steps.device))


def all_shapes(
    steps: GpuSteps, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> Iterator[DecodeShape | MixedShape]:
    """Shapes of steps, each once: those of single tokens first, then those with chunks of prompts."""
    tables = steps.cache.tables
    for batch in sorted({padded_batch(n) for n in range(1, max_num_seqs + 1)}):
        for bounds in all_bounds(steps.planner, tables, batch, max_model_len):
            yield DecodeShape(batch, bounds)
    most = min(MAX_CHUNK_TOKENS, max_num_batched_tokens)
    sizes = sorted({padded_chunk(n) for n in range(1, most + 1)})
    for batch in sorted({padded_decodes(n) for n in range(max_num_seqs)}):
        found: list[Bounds | None] = [None]
        if batch:
            found = [*all_bounds(steps.planner, tables, batch, max_model_len, beside_chunks=True)]
        for beside, size in product(found, sizes):
            yield MixedShape(batch, beside, size, least_tiles(size, steps.planner.tile_tokens))


def all_bounds(
    planner: GpuAttentionPlanner, tables: BlockTables, batch: int, max_model_len: int, beside_chunks: bool = False
) -> list[Bounds]:
    """Launch shapes of attention for ``batch`` single tokens."""
    counts = block_counts(tables, batch, max_model_len)
    return sorted({planner.split_of(each, batch, batch, beside_chunks)[1] for each in counts})


def block_counts(tables: BlockTables, batch: int, max_model_len: int) -> Iterator[list[int]]:
    """Numbers of blocks by rung that ``batch`` requests may hold together.

    Either all stand on the first rung, or all but a few, short ones or not, stand on the last one, or half of them do.
    """
    last = len(tables.ladder.rungs) - 1
    most = batch * (tables.blocks_for(max_model_len) + 2)  # sinks, and blocks of requests that are not in the step
    capacity = [tables.max_tokens(rung) // BLOCK_TOKENS + batch for rung in (0, last)]
    total = float(batch)
    while total < most * GROWTH:
        number = min(most, round(total))
        if number <= capacity[0]:
            yield [number] + [0] * last
        if last and batch < number <= capacity[1]:
            for first in (SHORT_ITEM * batch, SHORT_ITEM * batch + 1, number // 2):
                first = min(number - 1, first)
                yield [first] + [0] * (last - 1) + [number - first]
        total *= GROWTH


def _with_bar(shapes: list[DecodeShape | MixedShape]) -> Iterable[DecodeShape | MixedShape]:
    if not sys.stderr.isatty():
        return shapes
    from rich.console import Console
    from rich.progress import track

    return track(shapes, "capturing steps", console=Console(stderr=True), transient=True)
