"""One step's attention over the cache: where new K and V go, and the plan of reading, made once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

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
from .table import BlockTables


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


class StepPlanner:
    """Turns a scheduled batch and the block tables into what the layers call."""

    def __init__(self, memory: Tensor, ladder: Ladder):
        self.memory, self.ladder = memory, ladder
        self._layers = _layer_views(memory, ladder)

    def plan(self, batch: ScheduledBatch, tables: BlockTables) -> AttentionBatch:
        """Single tokens come first in the batch."""
        writes = self._writes(batch, tables)
        num_decodes = sum(1 for item in batch.items if item.num_tokens == 1)
        if self.memory.is_cuda:
            from .step_triton import plan_triton

            return plan_triton(batch, tables, self.memory, writes, self._layers, num_decodes)
        plan = None
        if num_decodes:
            located = [self._locate(item, item.end, tables) for item in batch.items[:num_decodes]]
            plan = DecodePlan.build(located, self.memory.device)
        chunks, first = [], num_decodes
        for item in batch.items[num_decodes:]:
            chunks.append(Chunk(first, first + item.num_tokens, self._locate(item, item.start, tables)))
            first += item.num_tokens
        return TorchStep(self._layers, writes, batch.num_tokens, num_decodes, plan, chunks)

    def _locate(self, item: ScheduledRequest, length: int, tables: BlockTables) -> Located:
        """Where the first ``length`` tokens of a request lie."""
        table, sink, dense = tables[item.request.request_id], self.ladder.sink, self.ladder.widest.block_nbytes
        found = Located(length)
        if not length:
            return found
        if table.sink is not None:
            found.sink = table.sink.slot.address // self.ladder.sink_nbytes, min(length, sink)
        num_full, rest = divmod(max(0, length - sink), BLOCK_TOKENS)
        for block in table.blocks[:num_full]:
            if block.rung:
                found.sealed.setdefault(block.rung, []).append(block.slot.address)
            else:
                found.full.append(block.slot.address // dense)
        if rest:
            found.open = table.blocks[num_full].slot.address // dense, rest
        return found

    def _writes(self, batch: ScheduledBatch, tables: BlockTables) -> list[Write]:
        """Where the K and V of the step's tokens go."""
        shape, sink = self.ladder.widest.shape, self.ladder.sink
        row_nbytes = self.ladder.widest.layout.sides[0].nbytes // (shape.num_kv_heads * shape.num_tokens)
        rows: dict[bool, list[int]] = {True: [], False: []}
        tokens: dict[bool, list[int]] = {True: [], False: []}
        first = 0
        for item in batch.items:
            table = tables[item.request.request_id]
            for p in range(item.start, item.end):
                if p < sink:
                    assert table.sink is not None
                    row = table.sink.slot.address // row_nbytes + p
                else:
                    block, offset = divmod(p - sink, BLOCK_TOKENS)
                    row = table.blocks[block].slot.address // row_nbytes + offset
                rows[p < sink].append(row)
                tokens[p < sink].append(first + p - item.start)
            first += item.num_tokens
        writes = []
        for is_sink, num_tokens in ((False, BLOCK_TOKENS), (True, self.ladder.sink)):
            if rows[is_sink]:
                heads = torch.arange(shape.num_kv_heads) * num_tokens
                where = (torch.tensor(rows[is_sink])[:, None] + heads).flatten().to(self.memory.device)
                some = None
                if len(tokens[is_sink]) < first:
                    some = torch.tensor(tokens[is_sink], device=self.memory.device)
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
