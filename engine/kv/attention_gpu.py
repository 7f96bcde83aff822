"""One step's attention on a GPU: device tables become the work plans of the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import Placed, place, update
from qkv_engine.kernels.paged_decode.split import SHORT_ITEM, ItemBlocks, choose_item_blocks, most_items, num_last
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.plan_triton import plan_decode
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, tile_tokens
from qkv_engine.kernels.rope_kv_write import rope_kv_write
from qkv_engine.kernels.tiles import DenseSide, PageFormat
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from ..config import BLOCK_TOKENS
from .device_tables import DeviceTables
from .ladder import Ladder

FEW_ITEMS = 256  # on a rung


class Cut(NamedTuple):
    """How decode attention is cut into work items: the blocks of one, how many there are at most on each rung, and
    whether the items of a rung are short.
    """

    item_blocks: ItemBlocks
    max_items: tuple[int, ...]
    short: tuple[bool, ...]


@dataclass(frozen=True)
class Chunks:
    """Chunks of prompts that a step computes after its single tokens, on the host.

    Shapes:  addresses, rungs [C, P] int64, the requests' block tables;  starts, counts [C] int64, tokens
    """

    addresses: Tensor
    rungs: Tensor
    starts: Tensor
    counts: Tensor


class GpuAttentionPlanner:
    """Turns a step's input on the device into what the layers call. Nothing here waits for the device."""

    def __init__(self, memory: Tensor, tables: DeviceTables):
        self.memory, self.tables = memory, tables
        self.pages = page_formats(tables.ladder)
        side = tables.ladder.widest.layout.sides[0]
        assert isinstance(side, DenseSide), "ladders begin dense"
        self.kv_rows = memory.view(side.dtype).view(-1, side.head_dim)  # dense pages are rows of one token and head
        self._row_nbytes = side.head_dim * side.dtype.itemsize
        self._item_blocks = ItemBlocks(1, 1)
        self.num_multiprocessors = 1
        if memory.is_cuda:
            self.num_multiprocessors = torch.cuda.get_device_properties(memory.device).multi_processor_count

    def cut(self, batch: int, positions: Sequence[int], advance: int = 0) -> Cut:
        """For single tokens ``advance`` behind ``positions`` of some of the requests, in a launch of ``batch`` rows.

        Sizes and numbers are few, so that few graphs serve all steps; what is idle ends at its first load. Sums of a
        request's attention thus depend on how much its neighbours hold, as those of its matrix products depend on how
        many they are.
        """
        if not positions:
            return Cut(ItemBlocks(1, 1), (), ())
        counts, num_decodes = self.tables.num_entries(), len(positions)
        heads = self.tables.ladder.widest.shape.num_kv_heads
        are_dense = 2 * counts[0] > sum(counts)
        sizes = self._item_blocks = choose_item_blocks(
            sum(counts), num_decodes, heads, self.num_multiprocessors, are_dense, self._item_blocks
        )
        last = positions[batch - num_last(batch) :]
        num_last_tokens = sum(last) + advance * len(last)
        num_last_blocks = num_last_tokens // BLOCK_TOKENS + 2 * len(last)  # a sink and one not full
        most = most_items(sum(counts), num_decodes, num_last_blocks, sizes)
        bounds = [most_items(count, num_decodes, num_last_blocks, sizes) for count in counts]
        # Where items are few, a graph serves however blocks are spread over the rungs.
        bounds = [max(bound, min(most, FEW_ITEMS)) if bound else 0 for bound in bounds]
        short = counts[0] <= SHORT_ITEM * num_decodes
        return Cut(sizes, tuple(map(_rounded_up, bounds)), (short, *[False] * (len(counts) - 1)))

    def chunks(self, rows: list[int], starts: list[int], counts: list[int]) -> Chunks:
        """Chunks of ``counts`` tokens from ``starts`` of the requests in ``rows`` of the tables."""
        first, number = torch.tensor(starts), torch.tensor(counts)
        sink = self.tables.ladder.sink
        entries = -((sink - first - number).clamp(max=0) // BLOCK_TOKENS) + bool(sink)
        addresses, rungs = self.tables.entries(rows, int(entries.max()))
        rungs.masked_fill_(torch.arange(rungs.shape[1]) >= entries[:, None], ABSENT)
        return Chunks(addresses, rungs, first, number)

    def begin(
        self,
        step_input: Tensor,
        num_tokens: int,
        num_decodes: int,
        cut: Cut,
        chunks: Chunks | None = None,
    ) -> tuple[Placed, GpuAttention]:
        """Brings the tables up to date and plans a step whose input is on the device, single tokens first.

        ``cut`` is that of the single tokens. Without chunks a graph can capture it.
        """
        tables = self.tables
        update(tables.block_words, step_input, num_tokens)
        placed = place(tables.block_words, step_input, num_tokens, tables.last_tokens, self._row_nbytes)
        decode = None
        if num_decodes:
            rows, lengths = placed.rows[:num_decodes], placed.lengths[:num_decodes]
            decode = plan_decode(
                tables.block_words,
                rows,
                lengths,
                item_blocks=cut.item_blocks,
                max_items=cut.max_items,
                short=cut.short,
            )
        return placed, GpuAttention(self, placed.token_rows, num_decodes, decode, chunks)


class GpuAttention:
    """Both kernels read the step's own tokens from their pages, so these are written first."""

    def __init__(
        self,
        planner: GpuAttentionPlanner,
        token_rows: Tensor,
        num_decodes: int,
        decode: DecodeWork | None,
        chunks: Chunks | None,
    ):
        self._token_rows, self._kv_rows = token_rows, planner.kv_rows
        self._memory, self._pages = planner.memory, planner.pages
        ladder = planner.tables.ladder
        self._num_kv_heads, self._sink = ladder.widest.shape.num_kv_heads, ladder.sink
        self._num_decodes, self._decode, self._chunks = num_decodes, decode, chunks
        self._prefill: PrefillWork | None = None

    def attend(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See ``AttentionBatch``. Rows of padding come out as zeros."""
        n, heads, scale, pages = self._num_decodes, self._num_kv_heads, qkv.shape[-1] ** -0.5, self._pages[layer]
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        q = rope_kv_write(qkv, *rotation, self._token_rows, self._kv_rows, layer, heads, weight, eps)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decode is not None:
            paged_decode(q[:n], self._memory, self._decode, pages, heads, scale, out[:n])
        if self._chunks is not None:
            paged_prefill(q[n:], self._memory, self._prefill_work(q.shape[1]), pages, heads, scale, out[n:])
        return out

    def _prefill_work(self, num_heads: int) -> PrefillWork:
        """Made by the first layer, which knows how many query heads share a tile."""
        if self._prefill is None:
            chunks = self._chunks
            assert chunks is not None
            self._prefill = PrefillWork.build(
                chunks.addresses,
                chunks.rungs,
                chunks.starts,
                chunks.counts,
                num_rungs=len(self._pages[0]),
                tile_tokens=tile_tokens(num_heads, self._num_kv_heads),
                sink_tokens=self._sink,
                block_tokens=BLOCK_TOKENS,
            ).to(self._memory.device)
        return self._prefill


def _rounded_up(number: int) -> int:
    """To few numbers: a program with nothing to do costs little, and a graph more much."""
    octave = 1 << max(0, number - 1).bit_length()
    step = octave // (1 if octave <= FEW_ITEMS else 4 if octave <= 1024 else 8)
    return -(-number // step) * step


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
