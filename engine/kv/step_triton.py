"""One step's attention on a GPU: block tables become the work plans of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, tile_tokens
from qkv_engine.kernels.tiles import PageFormat
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..config import BLOCK_TOKENS
from .ladder import Ladder
from .step import LayerView, Write, store
from .table import SINK, BlockTables

SPLIT_BLOCKS = 16  # blocks one program attends to; fixed, so that a request's result never depends on its neighbours


class TritonStep:
    """Both kernels read the step's own tokens from their pages, so these are written first."""

    def __init__(
        self,
        memory: Tensor,
        ladder: Ladder,
        layers: list[LayerView],
        writes: list[Write],
        num_decodes: int,
        decode: DecodeWork | None,
        chunks: tuple[Tensor, ...] | None,
    ):
        self._memory, self._layers, self._writes = memory, layers, writes
        self._num_kv_heads, self._sink = ladder.widest.shape.num_kv_heads, ladder.sink
        self._pages = page_formats(ladder)
        self._num_decodes, self._decode, self._chunks = num_decodes, decode, chunks
        self._prefill: PrefillWork | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores ``k`` and ``v``, then attends: q [N, HQ, D], k and v [N, H, D] after rope -> [N, HQ, D]."""
        store(self._layers[layer], self._writes, k, v)
        n, heads, scale, pages = self._num_decodes, self._num_kv_heads, q.shape[-1] ** -0.5, self._pages[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decode is not None:
            paged_decode(q[:n], self._memory, self._decode, pages, heads, scale, out[:n])
        if self._chunks is not None:
            paged_prefill(q[n:], self._memory, self._prefill_work(q.shape[1]), pages, heads, scale, out[n:])
        return out

    def _prefill_work(self, num_heads: int) -> PrefillWork:
        """Made by the first layer, which knows how many query heads share a tile."""
        if self._prefill is None:
            assert self._chunks is not None
            addresses, rungs, starts, counts = self._chunks
            self._prefill = PrefillWork.build(
                addresses,
                rungs,
                starts,
                counts,
                num_rungs=len(self._pages[0]),
                tile_tokens=tile_tokens(num_heads, self._num_kv_heads),
                sink_tokens=self._sink,
                block_tokens=BLOCK_TOKENS,
            ).to(self._memory.device)
        return self._prefill


def plan_triton(
    batch: ScheduledBatch,
    tables: BlockTables,
    memory: Tensor,
    writes: list[Write],
    layers: list[LayerView],
    num_decodes: int,
) -> TritonStep:
    """The step's plans, built on the host and copied over; single tokens come first in the batch."""
    ladder, decode, chunks = tables.ladder, None, None
    if num_decodes:
        items = batch.items[:num_decodes]
        addresses, rungs = _block_tables(items, tables)
        lengths = torch.tensor([item.end for item in items])
        splits = [SPLIT_BLOCKS] * len(ladder.rungs)
        decode = DecodeWork.build(
            addresses, rungs, lengths, split_blocks=splits, sink_tokens=ladder.sink, block_tokens=BLOCK_TOKENS
        ).to(memory.device)
    if num_decodes < len(batch.items):
        items = batch.items[num_decodes:]
        starts = torch.tensor([item.start for item in items])
        counts = torch.tensor([item.num_tokens for item in items])
        chunks = (*_block_tables(items, tables), starts, counts)
    return TritonStep(memory, ladder, layers, writes, num_decodes, decode, chunks)


def page_formats(ladder: Ladder) -> list[list[PageFormat]]:
    """How each layer's pages are read on each rung."""
    return [
        [
            PageFormat(
                rung.layout.sides[2 * layer],
                rung.layout.sides[2 * layer + 1],
                rung.layout.offsets[2 * layer],
                rung.layout.offsets[2 * layer + 1],
            )
            for rung in ladder.rungs
        ]
        for layer in range(len(ladder.widest.layers))
    ]


def _block_tables(items: list[ScheduledRequest], tables: BlockTables) -> tuple[Tensor, Tensor]:
    """Addresses and rungs [B, P] of the requests' blocks, the sink first; ``ABSENT`` where a request has none."""
    rows = [list(tables[item.request.request_id]) for item in items]
    width = max(len(row) for row in rows)
    addresses = [[block.slot.address for block in row] + [0] * (width - len(row)) for row in rows]
    rungs = [[0 if block.rung == SINK else block.rung for block in row] + [ABSENT] * (width - len(row)) for row in rows]
    return torch.tensor(addresses, dtype=torch.int64), torch.tensor(rungs, dtype=torch.int64)
