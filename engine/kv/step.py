"""One step's attention over the cache: where new K and V go, and the plan of reading, made once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.kv_write import kv_write
from qkv_engine.kernels.located import LayerPages, Located
from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode
from qkv_engine.kernels.paged_prefill import paged_prefill
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..config import BLOCK_TOKENS
from .formats.dense import Dense
from .ladder import Ladder
from .table import BlockTable, BlockTables


@dataclass(frozen=True)
class LayerView:
    """One layer's part of the arena: what attention reads, and the token rows [R, D] of K and of V to write."""

    pages: LayerPages
    block_rows: tuple[Tensor, Tensor]
    sink_rows: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Write:
    """Tokens of a step that go to blocks, or to sinks: ``rows`` [n * H] int64 and which of the step's tokens they are.

    ``tokens`` is ``None`` for all of them.
    """

    rows: Tensor
    tokens: Tensor | None
    is_sink: bool


@dataclass(frozen=True)
class Chunk:
    """Rows ``first:last`` of the step's tokens: a chunk of one request, after the tokens in ``past``."""

    first: int
    last: int
    past: Located


class Extent(NamedTuple):
    """The first tokens of a request: of its sink, full blocks, and tokens of the block after them."""

    table: BlockTable
    num_sink: int
    num_full: int
    num_open: int

    @property
    def num_tokens(self) -> int:
        return self.num_sink + self.num_full * BLOCK_TOKENS + self.num_open

    def is_like(self, other: Extent) -> bool:
        """Whether both end in the same block, and at most there differ."""
        same = self.table is other.table and self.num_full == other.num_full and self.num_sink == other.num_sink
        return same and bool(self.num_open) == bool(other.num_open)


class StepPlanner:
    """Turns a scheduled batch and the block tables into what the layers call."""

    def __init__(self, memory: Tensor, ladder: Ladder):
        self.memory, self.ladder = memory, ladder
        self._layers = _layer_views(memory, ladder)
        heads = torch.arange(ladder.widest.shape.num_kv_heads)
        self._head_rows = {True: heads * ladder.sink, False: heads * BLOCK_TOKENS}
        self._decodes: tuple[list[Extent], DecodePlan] | None = None  # of the last step

    def forget(self) -> None:
        """To be called when blocks have moved: what was planned for them is no longer true."""
        self._decodes = None

    def plan(self, batch: ScheduledBatch, tables: BlockTables) -> AttentionBatch:
        """Single tokens come first in the batch."""
        writes = self._writes(batch, tables)
        num_decodes = sum(1 for item in batch.items if item.num_tokens == 1)
        if self.memory.is_cuda:
            from .step_triton import plan_triton

            return plan_triton(batch, tables, self.memory, writes, self._layers, num_decodes)
        plan = self._plan_decodes(batch.items[:num_decodes], tables) if num_decodes else None
        chunks, first = [], num_decodes
        for item in batch.items[num_decodes:]:
            extent = self._extent(tables[item.request.request_id], item.start)
            chunks.append(Chunk(first, first + item.num_tokens, self._locate(extent)))
            first += item.num_tokens
        return TorchStep(self._layers, writes, batch.num_tokens, num_decodes, plan, chunks)

    def _plan_decodes(self, items: list[ScheduledRequest], tables: BlockTables) -> DecodePlan:
        """The plan of the last step with other lengths, unless a request came or went, or a block was filled."""
        extents = [self._extent(tables[item.request.request_id], item.end) for item in items]
        if self._decodes is None or not _are_alike(extents, self._decodes[0]):
            plan = DecodePlan.build([self._locate(extent) for extent in extents], BLOCK_TOKENS, self.memory.device)
            self._decodes = extents, plan
            return plan
        return self._decodes[1].with_lengths([e.num_open for e in extents if e.num_open], self.memory.device)

    def _extent(self, table: BlockTable, length: int) -> Extent:
        num_sink = min(length, self.ladder.sink)
        return Extent(table, num_sink, *divmod(length - num_sink, BLOCK_TOKENS))

    def _locate(self, extent: Extent) -> Located:
        """Where tokens of a request lie."""
        table, dense = extent.table, self.ladder.widest.block_nbytes
        found = Located(extent.num_tokens)
        if extent.num_sink:
            assert table.sink is not None
            found.sink = table.sink.slot.address // self.ladder.sink_nbytes, extent.num_sink
        for block in table.blocks[: extent.num_full]:
            if block.rung:
                found.sealed.setdefault(block.rung, []).append(block.slot.address)
            else:
                found.full.append(block.slot.address // dense)
        if extent.num_open:
            found.open = table.blocks[extent.num_full].slot.address // dense, extent.num_open
        return found

    def _writes(self, batch: ScheduledBatch, tables: BlockTables) -> list[Write]:
        """Where the K and V of the step's tokens go."""
        shape, sink = self.ladder.widest.shape, self.ladder.sink
        row_nbytes = self.ladder.widest.layout.sides[0].nbytes // (shape.num_kv_heads * shape.num_tokens)
        rows: dict[bool, list[int]] = {True: [], False: []}
        tokens: dict[bool, list[int]] = {True: [], False: []}
        first = 0
        for item in batch.items:
            table, start = tables[item.request.request_id], item.start
            while start < item.end:
                is_sink = start < sink
                index, offset = (0, start) if is_sink else divmod(start - sink, BLOCK_TOKENS)
                block = table.sink if is_sink else table.blocks[index]
                assert block is not None
                num_tokens = min(item.end - start, (sink if is_sink else BLOCK_TOKENS) - offset)
                row = block.slot.address // row_nbytes + offset
                rows[is_sink].extend(range(row, row + num_tokens))
                tokens[is_sink].extend(range(first, first + num_tokens))
                first, start = first + num_tokens, start + num_tokens
        device = self.memory.device
        writes = []
        for is_sink, heads in self._head_rows.items():
            if rows[is_sink]:
                where = (torch.tensor(rows[is_sink])[:, None] + heads).flatten().to(device)
                some = torch.tensor(tokens[is_sink], device=device) if len(tokens[is_sink]) < first else None
                writes.append(Write(where, some, is_sink))
        return writes


class TorchStep:
    """Vectorised torch, for the CPU."""

    def __init__(
        self,
        layers: list[LayerView],
        writes: list[Write],
        num_tokens: int,
        num_decodes: int,
        plan: DecodePlan | None,
        chunks: list[Chunk],
    ):
        self._layers, self._writes, self._num_tokens = layers, writes, num_tokens
        self._num_decodes, self._plan, self._chunks = num_decodes, plan, chunks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores ``k`` and ``v``, then attends: q [N, HQ, D], k and v [N, H, D] after rope -> [N, HQ, D].

        Rows beyond the step's tokens are padding; they come out as zeros.
        """
        if len(q) > self._num_tokens:
            out, n = torch.zeros_like(q), self._num_tokens
            out[:n] = self.attend(layer, q[:n], k[:n], v[:n])
            return out
        view, n, scale = self._layers[layer], self._num_decodes, q.shape[-1] ** -0.5
        store(view, self._writes, k, v)
        if not self._chunks and self._plan is not None:
            return paged_decode(q, view.pages, self._plan, scale)
        out = torch.empty_like(q)
        if self._plan is not None:
            out[:n] = paged_decode(q[:n], view.pages, self._plan, scale)
        for chunk in self._chunks:
            a, b = chunk.first, chunk.last
            out[a:b] = paged_prefill(q[a:b], k[a:b], v[a:b], view.pages, chunk.past, scale)
        return out


def _are_alike(extents: list[Extent], others: list[Extent]) -> bool:
    return len(extents) == len(others) and all(map(Extent.is_like, extents, others))


def store(view: LayerView, writes: list[Write], k: Tensor, v: Tensor) -> None:
    """Writes a layer's new K and V [N, H, D] where they belong."""
    for write in writes:
        k_rows, v_rows = view.sink_rows if write.is_sink else view.block_rows
        kv_write(write.rows, k if write.tokens is None else k[write.tokens], k_rows)
        kv_write(write.rows, v if write.tokens is None else v[write.tokens], v_rows)


def _layer_views(memory: Tensor, ladder: Ladder) -> list[LayerView]:
    rung, shape = ladder.widest, ladder.widest.shape
    fmt = rung.layers[0][0]
    assert isinstance(fmt, Dense), "ladders begin dense"
    elements = memory.view(fmt.dtype)
    rows = elements.view(-1, shape.head_dim)
    num_layers, heads = len(rung.layers), shape.num_kv_heads
    blocks = elements.view(-1, num_layers, 2, heads, BLOCK_TOKENS, shape.head_dim)
    sinks = None
    if ladder.sink:
        sinks = elements.view(-1, num_layers, 2, heads, ladder.sink, shape.head_dim)
    layouts = tuple(rung.layout for rung in ladder.rungs)

    def side_rows(layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        side = heads * num_tokens
        return rows[2 * layer * side :], rows[(2 * layer + 1) * side :]

    return [
        LayerView(
            LayerPages(i, memory, blocks[:, i], None if sinks is None else sinks[:, i], layouts),
            side_rows(i, BLOCK_TOKENS),
            side_rows(i, ladder.sink),
        )
        for i in range(num_layers)
    ]
