"""One step's attention on the CPU: target rows of new K and V and the plan of reads, made once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode
from qkv_engine.kernels.paged_prefill import paged_prefill
from qkv_engine.kernels.request_pages import LayerPages, RequestPages
from qkv_engine.kernels.rope_kv_write.cpu import head_rows, rope_kv_write
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from ...config import BLOCK_TOKENS
from ..layouts import Ladder
from ..tables import HostTables


@dataclass(frozen=True)
class Chunk:
    """Rows ``first:last`` of the step's tokens: a chunk of one request, after the tokens in ``past``."""

    first: int
    last: int
    past: RequestPages


class Extent(NamedTuple):
    """The first tokens of a table's row, counted in the sink, in full blocks, and in the block after them."""

    row: int
    num_sink: int
    num_full: int
    num_open: int

    @property
    def num_tokens(self) -> int:
        return self.num_sink + self.num_full * BLOCK_TOKENS + self.num_open

    def is_like(self, other: Extent) -> bool:
        """Whether both extents end in the same block, and differ there at most."""
        same = self.row == other.row and self.num_full == other.num_full and self.num_sink == other.num_sink
        return same and bool(self.num_open) == bool(other.num_open)


class CpuAttentionPlanner:
    """Planner of a step's attention over a backend's block tables, made once for all layers."""

    def __init__(self, memory: Tensor, tables: HostTables, ladder: Ladder):
        self.memory, self.tables, self.ladder = memory, tables, ladder
        self._pages = _layer_pages(memory, ladder)
        self._rows = memory.view(ladder.widest.dtype).view(-1, ladder.widest.shape.head_dim)
        self._row_nbytes = ladder.widest.shape.head_dim * ladder.widest.dtype.itemsize
        self._decodes: tuple[list[Extent], DecodePlan] | None = None  # of the last step

    def forget(self) -> None:
        """Drops the last step's plan; to be called when the tables have changed."""
        self._decodes = None

    def plan(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> AttentionBatch:
        """The plan of ``lengths`` tokens from ``starts`` of the requests in ``rows``; single tokens come first."""
        token_rows = torch.tensor(self._token_rows(rows, starts, lengths))
        num_decodes = sum(1 for length in lengths if length == 1)
        plan = self._plan_decodes(rows[:num_decodes], starts[:num_decodes]) if num_decodes else None
        chunks, first = [], num_decodes
        for row, start, length in list(zip(rows, starts, lengths, strict=True))[num_decodes:]:
            chunks.append(Chunk(first, first + length, self._locate(self._extent(row, start))))
            first += length
        heads = self.ladder.widest.shape.num_kv_heads
        by_layer = head_rows(token_rows, len(self._pages), heads)
        return CpuAttention(self._pages, self._rows, by_layer, num_decodes, plan, chunks)

    def _plan_decodes(self, rows: Sequence[int], starts: Sequence[int]) -> DecodePlan:
        """The last step's plan with new lengths; a new plan if a request came or went, or a block was filled."""
        extents = [self._extent(row, start + 1) for row, start in zip(rows, starts, strict=True)]
        if self._decodes is None or not _are_alike(extents, self._decodes[0]):
            plan = DecodePlan.build([self._locate(extent) for extent in extents], BLOCK_TOKENS)
            self._decodes = extents, plan
            return plan
        return self._decodes[1].with_lengths([extent.num_open for extent in extents])

    def _extent(self, row: int, length: int) -> Extent:
        num_sink = min(length, self.ladder.sink)
        return Extent(row, num_sink, *divmod(length - num_sink, BLOCK_TOKENS))

    def _locate(self, extent: Extent) -> RequestPages:
        """The pages of the tokens of ``extent``."""
        tables, sink, row_nbytes = self.tables, self.ladder.sink, self._row_nbytes
        found = RequestPages(extent.num_tokens, bank=tables.bank(extent.row))
        if extent.num_sink:
            found.sink = tables.entry(extent.row, 0)[0] // row_nbytes, extent.num_sink
        first = bool(sink)
        for index in range(first, first + extent.num_full):
            address, rung = tables.entry(extent.row, index)
            if rung:
                found.sealed.setdefault(rung, []).append(address)
            else:
                found.full.append(address // row_nbytes)
        if extent.num_open:
            found.open = tables.entry(extent.row, first + extent.num_full)[0] // row_nbytes, extent.num_open
        return found

    def _token_rows(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and strides by which the step's K and V are written, one a token; see ``kernels/rope_kv_write``."""
        sink, row_nbytes = self.ladder.sink, self._row_nbytes
        found: list[tuple[int, int]] = []
        for row, start, length in zip(rows, starts, lengths, strict=True):
            end = start + length
            while start < end:
                index, offset, stride = 0, start, sink
                if start >= sink:
                    index, offset = divmod(start - sink, BLOCK_TOKENS)
                    index, stride = index + bool(sink), BLOCK_TOKENS
                first = self.tables.entry(row, index)[0] // row_nbytes + offset
                num_tokens = min(end - start, stride - offset)
                found.extend((first + i, stride) for i in range(num_tokens))
                start += num_tokens
        return found


class CpuAttention:
    """Attention of a step's tokens in vectorised torch."""

    def __init__(
        self,
        pages: list[LayerPages],
        page_rows: Tensor,
        rows: Tensor,
        num_decodes: int,
        plan: DecodePlan | None,
        chunks: list[Chunk],
    ):
        self._pages, self._page_rows, self._rows = pages, page_rows, rows.unbind()
        self._num_kv_heads = pages[0].blocks.shape[2]
        self._num_tokens = rows.shape[1] // (2 * self._num_kv_heads)
        self._num_decodes, self._plan, self._chunks = num_decodes, plan, chunks

    def attend(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See ``AttentionBatch``. Rows beyond the step's tokens are padding; they come out as zeros."""
        if len(qkv) > self._num_tokens:
            n = self._num_tokens
            out = qkv.new_zeros(len(qkv), qkv.shape[1] - 2 * self._num_kv_heads, qkv.shape[2])
            out[:n] = self.attend(layer, qkv[:n], Rotation(*(x[:n] for x in rotation)), norm)
            return out
        pages, n, scale = self._pages[layer], self._num_decodes, qkv.shape[-1] ** -0.5
        q, kv = rope_kv_write(qkv, *rotation, self._rows[layer], self._page_rows, self._num_kv_heads, norm)
        if not self._chunks and self._plan is not None:
            return paged_decode(q, pages, self._plan, scale)
        out = torch.empty_like(q)
        if self._plan is not None:
            out[:n] = paged_decode(q[:n], pages, self._plan, scale)
        k, v = kv.chunk(2, dim=1)
        for chunk in self._chunks:
            a, b = chunk.first, chunk.last
            out[a:b] = paged_prefill(q[a:b], k[a:b], v[a:b], pages, chunk.past, scale)
        return out


def _are_alike(extents: list[Extent], others: list[Extent]) -> bool:
    return len(extents) == len(others) and all(map(Extent.is_like, extents, others))


def _layer_pages(memory: Tensor, ladder: Ladder) -> list[LayerPages]:
    elements, num_layers = memory.view(ladder.widest.dtype), len(ladder.widest.layers)
    blocks = _dense_slots(elements, ladder, BLOCK_TOKENS)
    sinks = _dense_slots(elements, ladder, ladder.sink) if ladder.sink else None
    layouts = tuple(rung.layout for rung in ladder.rungs)
    return [
        LayerPages(i, memory, blocks[:, i], None if sinks is None else sinks[:, i], layouts) for i in range(num_layers)
    ]


def _dense_slots(elements: Tensor, ladder: Ladder, num_tokens: int) -> Tensor:
    """Slots of ``num_tokens`` dense tokens, [R, L, 2, H, T, D]: as if one began at each row of a token and head."""
    shape = ladder.widest.shape
    slot = torch.Size((len(ladder.widest.layers), 2, shape.num_kv_heads, num_tokens, shape.head_dim))
    number = (len(elements) - slot.numel()) // shape.head_dim + 1
    strides = torch.empty(slot, device="meta").stride()
    return elements.as_strided((number, *slot), (shape.head_dim, *strides))
