"""One step's attention on a GPU: device tables become the work plans of the Triton kernels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import Placed, place, update
from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.plan_triton import plan_decode
from qkv_engine.kernels.paged_decode.split import Bounds
from qkv_engine.kernels.paged_decode.triton import kernel_names, paged_decode
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, tile_tokens
from qkv_engine.kernels.rope_kv_write import rope_kv_write
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from ..layouts import Ladder
from ..tables import DeviceTables
from .shapes import LaunchShapes

ChunkPlans = Mapping[int | None, PrefillWork]  # by window


class GpuAttentionPlanner:
    """Planner of a step's attention from its input on the device. Nothing here waits for the device.

    Layers with one window share a plan.
    """

    def __init__(
        self, memory: Tensor, tables: DeviceTables, ladder: Ladder, specs: Sequence[AttentionSpec], num_heads: int
    ):
        """``specs``: what attention computes in each layer;  ``num_heads``: query heads of a layer on this device."""
        self.memory, self.tables, self.specs = memory, tables, specs
        self.windows = sorted({spec.window for spec in specs}, key=lambda window: window or 0)
        dtype, head_dim = ladder.widest.dtype, ladder.widest.shape.head_dim
        self.num_kv_heads = ladder.widest.shape.num_kv_heads
        self.tile_tokens = tile_tokens(num_heads, self.num_kv_heads)
        self.pages = page_layouts(ladder)
        self.layers = [LayerFormats.of(pages, memory.device) for pages in self.pages]
        self.kv_rows = memory.view(dtype).view(-1, head_dim)  # dense pages are rows of one token and head
        self._row_nbytes = head_dim * dtype.itemsize
        num_multiprocessors = 1
        if memory.is_cuda:
            num_multiprocessors = torch.cuda.get_device_properties(memory.device).multi_processor_count
        self.shapes = LaunchShapes(self.num_kv_heads, num_multiprocessors)

    def split(self, num_decodes: int, batch: int, beside_chunks: bool = False) -> tuple[int, Bounds]:
        """``LaunchShapes.split`` for the blocks of the last command.

        The rounding of a request's attention depends on how much its neighbours hold, as that of its matrix products
        depends on the batch size.
        """
        return self.shapes.split(self.tables.num_blocks, num_decodes, batch, beside_chunks)

    def window_kernels(self, batch: int, bounds: Bounds) -> list[Hashable]:
        """``kernel_names`` of the plans of windows beside one of ``bounds``."""
        found = (self._split_window(window, batch, bounds)[1] for window in self.windows if window is not None)
        return [name for mine in found for name in kernel_names(mine, batch)]

    def _split_window(self, window: int, batch: int, bounds: Bounds) -> tuple[int, Bounds]:
        group = self.tables.group
        return self.shapes.split_window(window, group.block_tokens, len(group.rungs), batch, bounds)

    def plan_chunks(self, rows: list[int], starts: list[int], counts: list[int]) -> ChunkPlans:
        """The plans, on the host, of chunks of ``counts`` tokens from ``starts`` of the requests in ``rows``."""
        first, number = torch.tensor(starts), torch.tensor(counts)
        group = self.tables.group
        entries = -((group.sink - first - number).clamp(max=0) // group.block_tokens) + bool(group.sink)
        addresses, rungs = self.tables.entries(rows, int(entries.max()))
        rungs.masked_fill_(torch.arange(rungs.shape[1]) >= entries[:, None], ABSENT)
        return {
            window: PrefillWork.build(
                addresses,
                rungs,
                first,
                number,
                num_rungs=len(group.rungs),
                tile_tokens=self.tile_tokens,
                sink_tokens=group.sink,
                block_tokens=group.block_tokens,
                banks=self.tables.banks(rows),
                window=window,
            )
            for window in self.windows
        }

    def begin(
        self,
        step_input: Tensor,
        num_tokens: int,
        num_decodes: int,
        bounds: Bounds | None,
        chunks: ChunkPlans | None = None,
    ) -> tuple[Placed, GpuAttention]:
        """Brings the tables up to date and plans a step whose input is on the device, single tokens first.

        ``bounds``: the launch shape of the single tokens, if there are any;  ``chunks``: the plans of the others, on
        the device.
        """
        tables = self.tables
        update(tables.block_words, step_input, num_tokens)
        placed = place(tables.block_words, step_input, num_tokens, tables.last_tokens, self._row_nbytes)
        decodes = dict[int | None, DecodeWork]()
        if bounds is not None:
            found = placed.rows[:num_decodes], placed.lengths[:num_decodes], len(tables.group.rungs)
            for window in self.windows:
                if window is None:
                    decodes[None] = plan_decode(tables.block_words, step_input, *found, bounds)
                else:
                    size, mine = self._split_window(window, num_decodes, bounds)
                    decodes[window] = plan_decode(tables.block_words, step_input, *found, mine, window, size)
        return placed, GpuAttention(self, placed.token_rows, num_decodes, decodes, chunks or {})


class GpuAttention:
    """Attention of a step's tokens: K and V are written first, then both kernels read them from their pages."""

    def __init__(
        self,
        planner: GpuAttentionPlanner,
        token_rows: Tensor,
        num_decodes: int,
        decodes: Mapping[int | None, DecodeWork],
        chunks: ChunkPlans,
    ):
        """``decodes``: the plans of the step's single tokens, by window."""
        self._token_rows, self._kv_rows = token_rows, planner.kv_rows
        self._memory, self._pages, self._layers = planner.memory, planner.pages, planner.layers
        self._specs = planner.specs
        self._num_kv_heads = planner.num_kv_heads
        self._num_decodes, self._decodes, self._chunks = num_decodes, decodes, chunks

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionBatch``. Rows of padding come out as zeros, those behind chunks as anything."""
        n, heads, spec = self._num_decodes, self._num_kv_heads, self._specs[layer]
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        q = rope_kv_write(qkv, *rotation, self._token_rows, self._kv_rows, layer, heads, weight, eps)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, chunks = self._decodes.get(spec.window), self._chunks.get(spec.window)
        rule = spec.softcap, null_logits
        if decode is not None:
            paged_decode(q[:n], self._memory, decode, self._layers[layer], spec.scale, out[:n], None, *rule)
        if chunks is not None:
            paged_prefill(q[n:], self._memory, chunks, self._pages[layer], spec.scale, out[n:], None, *rule)
        return out


def page_layouts(ladder: Ladder) -> list[list[PageLayout]]:
    """Page layouts, layer by layer, on each rung."""
    return [list(pages) for pages in zip(*(rung.layout.pages for rung in ladder.rungs), strict=True)]
