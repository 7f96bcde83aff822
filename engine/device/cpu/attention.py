"""One step's attention on the CPU: target rows of new K and V and the plan of reads, made once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode
from qkv_engine.kernels.paged_decode.cut import agreeing_unit
from qkv_engine.kernels.paged_prefill import paged_prefill
from qkv_engine.kernels.request_pages import LayerPages, RequestPages
from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.kernels.rope_kv_write.cpu import head_rows, rope_kv_write
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from ...config import BLOCK_TOKENS
from ..grouped_attention import over_groups
from ..layouts import Ladder, LayerGroup
from ..tables import GroupWords, HostTables


@dataclass(frozen=True)
class Chunk:
    """Rows ``first:last`` of the step's tokens: a chunk of one request, after the tokens in ``past``.

    ``num_asked``: how many of the last ones some result is read from.
    """

    first: int
    last: int
    past: RequestPages
    num_asked: int


class Extent(NamedTuple):
    """The first tokens of a table's row, counted in the sink, in full blocks, and in the block after them."""

    row: int
    num_sink: int
    num_full: int
    num_open: int

    @property
    def num_tokens(self) -> int:
        return self.num_sink + self.num_full * BLOCK_TOKENS + self.num_open

    @property
    def num_left(self) -> int:
        """Tokens that may follow without another block being begun or filled."""
        return BLOCK_TOKENS - 1 - self.num_open if self.num_open else 0


class Decodes(NamedTuple):
    """A step of single tokens: its ``plan``, the ``rows`` that K and V are written to, and how full open blocks are.

    ``num_left``: steps that may follow without a block being begun or filled.
    """

    plan: DecodePlan
    rows: Tensor
    num_open: list[int]
    num_left: int


class CpuAttentionPlanner:
    """Planner of a step's attention over a backend's block tables, made once for all layers."""

    def __init__(
        self,
        memory: Tensor,
        tables: HostTables,
        ladder: Ladder,
        specs: Sequence[AttentionSpec],
        deterministic: bool = False,
        last_layer: int | None = None,
    ):
        """``specs``: what attention computes in each layer.

        ``deterministic``: a token's attention has the same bits whatever requests are beside it. ``last_layer``: the
        layer that leaves tokens out whose attention no result is read from, if there is one.
        """
        self._ladder = ladder
        last = (None, None) if last_layer is None else ladder.places[last_layer]
        self._groups = [
            CpuGroupPlanner(
                memory,
                words,
                group,
                [specs[layer] for layer in group.layers],
                deterministic,
                last[1] if number == last[0] else None,
            )
            for number, (words, group) in enumerate(zip(tables.groups, ladder.groups, strict=True))
        ]

    def forget(self) -> None:
        """Drops the last step's plan; to be called when the tables have changed."""
        for group in self._groups:
            group.forget()

    def plan(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        goes_on: bool = False,
        asked: Sequence[int] | None = None,
    ) -> AttentionBatch:
        """The plan of ``lengths`` tokens from ``starts`` of the requests in ``rows``; single tokens come first.

        ``goes_on``: they are the next single tokens of the last plan's requests, in the same order. ``asked``: how many
        of the last tokens of each some result is read from, None for all.
        """
        asked = lengths if asked is None else asked
        plans = [(goes_on and group.go_on()) or group.plan(rows, starts, lengths, asked) for group in self._groups]
        return over_groups(self._ladder, plans)

    def order(self, rows: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Single tokens as the blocks lie in memory that they are written to: so blocks are read in place, in order."""
        main = self._groups[self._ladder.groups.index(self._ladder.main)]
        return sorted(range(len(rows)), key=lambda i: main.place(rows[i], starts[i]))


class CpuGroupPlanner:
    """Planner of one group, whose layers all have its window."""

    def __init__(
        self,
        memory: Tensor,
        tables: GroupWords,
        group: LayerGroup,
        specs: Sequence[AttentionSpec],
        deterministic: bool,
        last_layer: int | None,
    ):
        self._is_steady, self._last_layer = deterministic, last_layer
        self.tables, self.sink, self.window = tables, group.spec.sink, group.visible
        self._specs = specs
        self._num_kv_heads = group.widest.shape.num_kv_heads
        self._pages = _layer_pages(memory, group)
        self._rows = memory.view(group.widest.dtype).view(-1, group.widest.shape.head_dim)
        self._row_nbytes = group.row_nbytes
        self._last: Decodes | None = None  # the last step's, without a window and chunks

    def forget(self) -> None:
        """Drops the last step's plan."""
        self._last = None

    def go_on(self) -> CpuAttention | None:
        """The last step's plan for the next tokens; ``None`` if a block is begun or filled."""
        if self._last is None or not self._last.num_left:
            return None
        num_open = [number + 1 for number in self._last.num_open]
        plan, rows = self._last.plan.with_lengths(num_open), self._last.rows + 1
        self._last = Decodes(plan, rows, num_open, self._last.num_left - 1)
        return self._attention(rows, len(num_open), plan, [])

    def plan(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], asked: Sequence[int]
    ) -> CpuAttention:
        """See ``CpuAttentionPlanner``."""
        token_rows = torch.tensor(self._token_rows(rows, starts, lengths))
        by_layer = head_rows(token_rows, len(self._pages), self._num_kv_heads)
        num_decodes = sum(1 for length in lengths if length == 1)
        extents = [self._extent(row, start + 1) for row, start in zip(rows[:num_decodes], starts, strict=False)]
        plan = self._plan_decodes(extents) if extents else None
        chunks, first = [], num_decodes
        for row, start, length, number in list(zip(rows, starts, lengths, asked, strict=True))[num_decodes:]:
            chunks.append(Chunk(first, first + length, self._past(row, start), number))
            first += length
        self._last = None
        if plan is not None and not chunks and self.window is None:
            num_left = min(extent.num_left for extent in extents)
            self._last = Decodes(plan, by_layer, [extent.num_open for extent in extents], num_left)
        return self._attention(by_layer, num_decodes, plan, chunks)

    def _attention(
        self, by_layer: Tensor, num_decodes: int, plan: DecodePlan | None, chunks: list[Chunk]
    ) -> CpuAttention:
        return CpuAttention(
            self._specs,
            self.window,
            self._pages,
            self._rows,
            by_layer,
            num_decodes,
            plan,
            chunks,
            self._last_layer,
        )

    def _plan_decodes(self, extents: list[Extent]) -> DecodePlan:
        """The plan of single tokens. A window's edge is elsewhere in each step, and so is its plan made anew."""
        starts = [0 if self.window is None else extent.num_tokens - self.window for extent in extents]
        return self._build([self._locate(*each) for each in zip(extents, starts, strict=True)])

    def _build(self, pages: list[RequestPages]) -> DecodePlan:
        unit = self._unit() if self._is_steady else None
        return DecodePlan.build(pages, BLOCK_TOKENS, self.window, sink_tokens=self.sink, unit=unit)

    def _unit(self) -> int:
        """Tokens of which a multiple of an open block is attended, since more hidden ones change no bit."""
        spec, dtype = self._specs[0], self._pages[0].blocks.dtype
        if spec.softcap is not None:  # its products are not those of the other layers
            return BLOCK_TOKENS
        shape = max(2, spec.num_heads // spec.num_kv_heads), spec.head_dim, dtype
        return agreeing_unit(shape, self.sink, BLOCK_TOKENS)

    def _extent(self, row: int, length: int) -> Extent:
        num_sink = min(length, self.sink)
        return Extent(row, num_sink, *divmod(length - num_sink, BLOCK_TOKENS))

    def _past(self, row: int, start: int) -> RequestPages:
        """The pages of the tokens before ``start`` that some later token sees."""
        return self._locate(self._extent(row, start), 0 if self.window is None else start + 1 - self.window)

    def _locate(self, extent: Extent, start: int = 0) -> RequestPages:
        """The pages of the tokens of ``extent``, but for blocks with none from position ``start`` on."""
        tables, sink, row_nbytes = self.tables, self.sink, self._row_nbytes
        found = RequestPages(extent.num_tokens, bank=tables.bank(extent.row))
        if max(0, start) < extent.num_sink:
            found.sink = tables.entry(extent.row, 0)[0] // row_nbytes, extent.num_sink
        first = bool(sink)
        for index in range(max(0, start - sink) // BLOCK_TOKENS, extent.num_full):
            address, rung = tables.entry(extent.row, first + index)
            found.positions.setdefault(rung, []).append(sink + index * BLOCK_TOKENS)
            if rung:
                found.sealed.setdefault(rung, []).append(address)
            else:
                found.full.append(address // row_nbytes)
        if extent.num_open and start < extent.num_tokens:
            found.open = tables.entry(extent.row, first + extent.num_full)[0] // row_nbytes, extent.num_open
        return found

    def place(self, row: int, position: int) -> tuple[int, int, int]:
        """Where a token is written: its row, the rows from head to head, and its number in its slot."""
        index, offset, stride = 0, position, self.sink
        if position >= self.sink:
            index, offset = divmod(position - self.sink, BLOCK_TOKENS)
            index, stride = index + bool(self.sink), BLOCK_TOKENS
        return self.tables.entry(row, index)[0] // self._row_nbytes + offset, stride, offset

    def _token_rows(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Rows and strides by which the step's K and V are written, one a token; see ``kernels/rope_kv_write``."""
        found: list[tuple[int, int]] = []
        for row, start, length in zip(rows, starts, lengths, strict=True):
            end = start + length
            while start < end:
                first, stride, offset = self.place(row, start)
                num_tokens = min(end - start, stride - offset)
                found.extend((first + i, stride) for i in range(num_tokens))
                start += num_tokens
        return found


class CpuAttention:
    """Attention of a step's tokens over one group's tables in vectorised torch."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        window: int | None,
        pages: list[LayerPages],
        page_rows: Tensor,
        rows: Tensor,
        num_decodes: int,
        plan: DecodePlan | None,
        chunks: list[Chunk],
        last_layer: int | None,
    ):
        """``plan`` of the step's single tokens. ``last_layer`` attends to what is asked for of the others alone."""
        self._specs, self._window = specs, window
        self._pages, self._page_rows, self._rows = pages, page_rows, rows.unbind()
        self._num_kv_heads = pages[0].blocks.shape[2]
        self._num_tokens = rows.shape[1]
        self._num_decodes, self._plan, self._chunks, self._last_layer = num_decodes, plan, chunks, last_layer

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch``. Rows of padding and those that the last layer leaves out come out as zeros."""
        if len(qkv) > self._num_tokens:
            n = self._num_tokens
            out = qkv.new_zeros(len(qkv), qkv.shape[1] - 2 * self._num_kv_heads, qkv.shape[2])
            rotation = Rotation(*(x[:n] for x in rotation))
            out[:n] = self.attend(layer, qkv[:n], rotation, norm, null_logits, key_basis)
            return out
        pages, n, spec = self._pages[layer], self._num_decodes, self._specs[layer]
        scale, softcap = spec.scale, spec.softcap
        rows, heads = self._rows[layer], self._num_kv_heads
        q, kv = rope_kv_write(qkv, *rotation, rows, self._page_rows, heads, norm, key_basis)
        plan = self._plan
        if not self._chunks and plan is not None:
            return paged_decode(q, pages, plan, scale, softcap=softcap, null_logits=null_logits)
        out = torch.empty_like(q)
        if plan is not None:
            out[:n] = paged_decode(q[:n], pages, plan, scale, softcap=softcap, null_logits=null_logits)
        k, v = kv.chunk(2, dim=1)
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.last)
            number = chunk.num_asked if layer == self._last_layer else chunk.last - chunk.first
            asked = slice(chunk.last - number, chunk.last)
            out[chunk.first : asked.start] = 0
            if not number:
                continue
            out[asked] = paged_prefill(
                q[asked],
                k[part],
                v[part],
                pages,
                chunk.past,
                scale,
                window=self._window,
                softcap=softcap,
                null_logits=null_logits,
            )
        return out


def _layer_pages(memory: Tensor, group: LayerGroup) -> list[LayerPages]:
    elements, num_layers = memory.view(group.widest.dtype), len(group.widest.layers)
    blocks = _dense_slots(elements, group, BLOCK_TOKENS)
    sinks = _dense_slots(elements, group, group.spec.sink) if group.spec.sink else None
    layouts = tuple(rung.layout for rung in group.rungs)
    return [
        LayerPages(i, memory, blocks[:, i], None if sinks is None else sinks[:, i], layouts) for i in range(num_layers)
    ]


def _dense_slots(elements: Tensor, group: LayerGroup, num_tokens: int) -> Tensor:
    """Slots of ``num_tokens`` dense tokens, [R, L, 2, H, T, D]: as if one began at each row of a token and head."""
    shape = group.widest.shape
    slot = torch.Size((len(group.widest.layers), 2, shape.num_kv_heads, num_tokens, shape.head_dim))
    number = (len(elements) - slot.numel()) // shape.head_dim + 1
    strides = torch.empty(slot, device="meta").stride()
    return elements.as_strided((number, *slot), (shape.head_dim, *strides))
