"""One step's attention on a GPU: device tables become the work plans of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import Placed, place, update
from qkv_engine.kernels.formats import PageLayout, Side
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.plan_triton import plan_decode
from qkv_engine.kernels.paged_decode.split import SHORT_ITEM, Split, choose_split, most_items
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, tile_tokens
from qkv_engine.kernels.rope_kv_write import rope_kv_write
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from ..config import BLOCK_TOKENS
from .device_tables import DeviceTables
from .ladder import Ladder

FEW_ITEMS = 256  # work items of a launch: up to so many, bounds grow by octaves and not by parts of them


class GpuAttentionPlanner:
    """Planner of a step's attention from its input on the device. Nothing here waits for the device."""

    def __init__(self, memory: Tensor, tables: DeviceTables, num_heads: int):
        """``num_heads``: query heads of a layer."""
        self.memory, self.tables = memory, tables
        self.tile_tokens = tile_tokens(num_heads, tables.ladder.widest.shape.num_kv_heads)
        self.pages = page_layouts(tables.ladder)
        self.layers = [LayerFormats.of(pages, memory.device) for pages in self.pages]
        dtype, head_dim = tables.ladder.widest.dtype, tables.ladder.widest.shape.head_dim
        self.kv_rows = memory.view(dtype).view(-1, head_dim)  # dense pages are rows of one token and head
        self._row_nbytes = head_dim * dtype.itemsize
        self._formats = format_numbers(self.pages)
        self._item_blocks = 1
        self.num_multiprocessors = 1
        if memory.is_cuda:
            self.num_multiprocessors = torch.cuda.get_device_properties(memory.device).multi_processor_count

    def split(self, num_decodes: int) -> Split:
        """The launch shape of attention for the single tokens of ``num_decodes`` requests, as the tables stand.

        Sizes and bounds are few, so that few graphs serve all steps. Sums of a request's attention thus depend on how
        much its neighbours hold, as those of its matrix products depend on how many they are.
        """
        counts = self.tables.num_entries()
        total, heads = sum(counts), self.tables.ladder.widest.shape.num_kv_heads
        is_dense = 2 * counts[0] > total
        size = choose_split(total, num_decodes, heads, self.num_multiprocessors, is_dense, self._item_blocks)
        self._item_blocks = size
        first, *others = (most_items(count, num_decodes, size) for count in counts)
        # Where items are few, a graph serves however blocks are spread over the rungs.
        least = min(most_items(total, num_decodes, size), FEW_ITEMS)
        bounds = [_rounded_up(max(bound, least)) if bound else 0 for bound in (first, sum(others))]
        # Launches are by format: a graph serves whichever rungs have no other formats than those present.
        present = frozenset[int]().union(*(f for f, count in zip(self._formats, counts, strict=True) if count))
        rungs = tuple(rung for rung, formats in enumerate(self._formats) if formats <= present)
        return Split(size, (bounds[0], bounds[1]), rungs, counts[0] <= SHORT_ITEM * num_decodes)

    def plan_chunks(self, rows: list[int], starts: list[int], counts: list[int]) -> PrefillWork:
        """The plan, on the host, of chunks of ``counts`` tokens from ``starts`` of the requests in ``rows``."""
        first, number = torch.tensor(starts), torch.tensor(counts)
        ladder = self.tables.ladder
        entries = -((ladder.sink - first - number).clamp(max=0) // BLOCK_TOKENS) + bool(ladder.sink)
        addresses, rungs = self.tables.entries(rows, int(entries.max()))
        rungs.masked_fill_(torch.arange(rungs.shape[1]) >= entries[:, None], ABSENT)
        return PrefillWork.build(
            addresses,
            rungs,
            first,
            number,
            num_rungs=len(ladder.rungs),
            tile_tokens=self.tile_tokens,
            sink_tokens=ladder.sink,
            block_tokens=BLOCK_TOKENS,
            banks=self.tables.banks(rows),
        )

    def begin(
        self,
        step_input: Tensor,
        num_tokens: int,
        num_decodes: int,
        split: Split | None,
        chunks: PrefillWork | None = None,
    ) -> tuple[Placed, GpuAttention]:
        """Brings the tables up to date and plans a step whose input is on the device, single tokens first.

        ``split`` is that of the single tokens, if there are any; ``chunks`` the plan of the others, on the device.
        """
        tables = self.tables
        update(tables.block_words, step_input, num_tokens)
        placed = place(tables.block_words, step_input, num_tokens, tables.last_tokens, self._row_nbytes)
        decode = None
        if split is not None:
            rows, lengths = placed.rows[:num_decodes], placed.lengths[:num_decodes]
            decode = plan_decode(tables.block_words, rows, lengths, len(tables.ladder.rungs), split)
        return placed, GpuAttention(self, placed.token_rows, num_decodes, decode, chunks)


class GpuAttention:
    """Attention of a step's tokens, whose K and V are written first: both kernels read them from their pages."""

    def __init__(
        self,
        planner: GpuAttentionPlanner,
        token_rows: Tensor,
        num_decodes: int,
        decode: DecodeWork | None,
        chunks: PrefillWork | None,
    ):
        self._token_rows, self._kv_rows = token_rows, planner.kv_rows
        self._memory, self._pages, self._layers = planner.memory, planner.pages, planner.layers
        self._num_kv_heads = planner.tables.ladder.widest.shape.num_kv_heads
        self._num_decodes, self._decode, self._chunks = num_decodes, decode, chunks

    def attend(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See ``AttentionBatch``. Rows of padding come out as zeros, those behind chunks as anything."""
        n, heads, scale = self._num_decodes, self._num_kv_heads, qkv.shape[-1] ** -0.5
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        q = rope_kv_write(qkv, *rotation, self._token_rows, self._kv_rows, layer, heads, weight, eps)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decode is not None:
            paged_decode(q[:n], self._memory, self._decode, self._layers[layer], heads, scale, out[:n])
        if self._chunks is not None:
            paged_prefill(q[n:], self._memory, self._chunks, self._pages[layer], heads, scale, out[n:])
        return out


def _rounded_up(number: int) -> int:
    """``number`` rounded up to few values: an idle program is cheap, another captured graph is not."""
    octave = 1 << max(0, number - 1).bit_length()
    step = octave // (1 if octave <= FEW_ITEMS else 4 if octave <= 1024 else 8)
    return -(-number // step) * step


def page_layouts(ladder: Ladder) -> list[list[PageLayout]]:
    """How each layer's pages are read on each rung."""
    return [list(pages) for pages in zip(*(rung.layout.pages for rung in ladder.rungs), strict=True)]


def format_numbers(pages: list[list[PageLayout]]) -> list[frozenset[int]]:
    """Numbers of the formats that the layers' pages have on each rung; equal (K side, V side) pairs have one number."""
    numbers: dict[tuple[Side, Side], int] = {}
    return [
        frozenset(numbers.setdefault((page.k, page.v), len(numbers)) for page in rung)
        for rung in zip(*pages, strict=True)
    ]
