"""Shapes of steps that an engine's limits allow, captured before its first request."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby

from qkv_engine.kernels.paged_decode.split import SHORT_ITEM

from ...kv.spec import GroupSpec
from ..backend import Captured, StepLimits
from ..memory import free_memory
from .attention import NO_ITEMS, GpuAttentionPlanner
from .graphs import MAX_GRAPHS
from .mixed import MAX_CHUNK_TOKENS, MixedShape, least_tiles, padded_chunk, padded_decodes
from .steps import DecodeShape, GpuSteps, padded_batch

StepShape = DecodeShape | MixedShape
GROWTH = 2**0.25  # between two numbers of blocks that are looked at, fewer than the octave between most shapes


def capture_all(steps: GpuSteps, limits: StepLimits) -> Captured:
    """Captures every shape of a step that ``limits`` allow, with a bar on stderr if that is a terminal.

    Steps over many blocks that requests share are captured when they are met, and so are those with many short chunks
    or, of hybrids, with chunks of several requests, and those beyond the most graphs that are kept.
    """
    start, before = time.monotonic(), free_memory(steps.device)
    planner = steps.planner
    found = all_shapes(planner, planner.memory.nbytes, limits)
    shapes = [shape for shape in found if isinstance(shape, DecodeShape) or steps.mixed is not None][:MAX_GRAPHS]
    shapes.sort(key=lambda shape: shape.num_rows, reverse=True)  # smaller steps find room in the memory of larger ones
    for shape in _with_bar(shapes):
        steps.capture(shape)
    return Captured(len(shapes), time.monotonic() - start, before - free_memory(steps.device))


def all_shapes(planner: GpuAttentionPlanner, kv_nbytes: int, limits: StepLimits) -> Iterator[StepShape]:
    """Shapes of steps over ``kv_nbytes`` of KV memory, each once: single tokens first, then with chunks of prompts.

    Plans of windows have one shape in all steps of a batch.
    """
    full = planner.full_group
    for batch, numbers in groupby(range(1, limits.max_num_seqs + 1), padded_batch):
        if full is None:
            yield DecodeShape(batch, NO_ITEMS)
            continue
        states = block_counts(full.spec, kv_nbytes, batch, limits.max_model_len)
        for bounds in full.shapes.all_bounds(batch, states, list(numbers)):
            yield DecodeShape(batch, bounds)
    most, num_items = min(MAX_CHUNK_TOKENS, limits.max_num_batched_tokens), int(planner.states is not None)
    sizes = sorted({padded_chunk(n) for n in range(1, most + 1)})
    for batch in sorted({padded_decodes(n) for n in range(limits.max_num_seqs)}):
        beside = None if not batch else NO_ITEMS
        if batch and full is not None:
            beside = full.shapes.split([0] * len(full.spec.rungs), batch, batch, beside_chunks=True)[1]
        for size in sizes:
            yield MixedShape(batch, beside, size, least_tiles(size, planner.tile_tokens), num_items)


def block_counts(group: GroupSpec, kv_nbytes: int, batch: int, max_model_len: int) -> Iterator[tuple[int, ...]]:
    """Numbers of blocks by rung that ``batch`` requests may hold together in ``kv_nbytes`` if they share none.

    All stand on the first rung, or all but a few, short ones or not, or half of them; the others stand on the last
    rung, or evenly on all but the first.
    """
    sizes = [rung.nbytes for rung in group.rungs]
    num_others = len(sizes) - 1
    blocks = group.blocks_for(max_model_len)
    most = batch * (blocks + 2)  # request slots, and blocks of requests that are not in the step
    total = batch
    while total <= most:
        found = {(total, *[0] * num_others)}
        for first in (batch, SHORT_ITEM * batch, SHORT_ITEM * batch + 1, total // 2):
            if num_others and 0 < first < total:
                found |= {(first, *_last(total - first, num_others)), (first, *_evenly(total - first, num_others))}
        # A request slot or an open block takes less than a block.
        yield from (counts for counts in found if _nbytes([counts[0] - batch, *counts[1:]], sizes) <= kv_nbytes)
        total = total + 1 if total == most else min(most, math.ceil(total * GROWTH))


def _last(number: int, num_rungs: int) -> list[int]:
    return [0] * (num_rungs - 1) + [number]


def _evenly(number: int, num_rungs: int) -> list[int]:
    return [(number + i) // num_rungs for i in range(num_rungs)]


def _nbytes(counts: list[int], sizes: list[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _with_bar(shapes: list[StepShape]) -> Iterable[StepShape]:
    if not sys.stderr.isatty():
        return shapes
    from rich.console import Console
    from rich.progress import track

    return track(shapes, "capturing steps", console=Console(stderr=True), transient=True)
