"""One step's attention on a GPU: device tables become the work plans of the Triton kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import BlockWords, Placed, place, update
from qkv_engine.kernels.delta_net.plan import ChunkWork
from qkv_engine.kernels.formats import PageLayout
from qkv_engine.kernels.paged_decode.layer import LayerFormats
from qkv_engine.kernels.paged_decode.plan import ABSENT, DecodeWork
from qkv_engine.kernels.paged_decode.plan_triton import plan_decode
from qkv_engine.kernels.paged_decode.split import STEADY_BLOCKS, Bounds
from qkv_engine.kernels.paged_decode.triton import paged_decode
from qkv_engine.kernels.paged_prefill.plan import PrefillWork
from qkv_engine.kernels.paged_prefill.triton import paged_prefill, query_rows, tile_tokens
from qkv_engine.kernels.rope_kv_write import KeyBasis, rope_kv_write
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from ..grouped_attention import over_groups
from ..hybrid_step import HybridStep
from ..layouts import Ladder, LayerGroup
from ..tables import DeviceTables, GroupWords
from .shapes import LaunchShapes
from .states import GpuStatePlanner, GpuStates

ChunkPlans = Sequence[PrefillWork]  # by group
NO_ITEMS = Bounds(0, 0)  # of the layers without a window, where there are none


class LastChunks(NamedTuple):
    """The plan of the last layer's chunks, which leaves out tiles that no result is read from: a layer of a group."""

    group: int
    layer: int
    work: PrefillWork


class GpuAttentionPlanner:
    """Planner of a step's attention from its input on the device. Nothing here waits for the device."""

    def __init__(
        self,
        memory: Tensor,
        tables: DeviceTables,
        ladder: Ladder,
        specs: Sequence[AttentionSpec],
        deterministic: bool = False,
        last_layer: int | None = None,
    ):
        """``specs``: what attention computes in each layer, with the heads that are on this device.

        ``deterministic``: a token's attention has the same bits whatever requests are beside it. ``last_layer``: the
        layer that leaves tokens out whose attention no result is read from, if there is one.
        """
        self.memory, self.tables, self._ladder = memory, tables, ladder
        num_multiprocessors = 1
        if memory.is_cuda:
            num_multiprocessors = torch.cuda.get_device_properties(memory.device).multi_processor_count
        dtype = ladder.main.widest.dtype
        self.tile_tokens = min(
            tile_tokens(spec.num_heads, spec.num_kv_heads, query_rows(spec.head_dim, dtype, memory.device))
            for spec in specs
        )
        parts = zip(tables.groups, tables.block_words, ladder.groups, strict=True)
        self.groups = [
            GpuGroupPlanner(
                memory, *part, [specs[layer] for layer in part[-1].layers], num_multiprocessors, deterministic
            )
            for part in parts
        ]
        main = ladder.groups.index(ladder.main)
        self.states: GpuStatePlanner | None = None
        if ladder.states:
            self.states = GpuStatePlanner(memory, tables.groups[main], tables.block_words[main], ladder.states)
        self._last = None if last_layer is None else ladder.places[last_layer]
        self._full = [number for number, group in enumerate(self.groups) if group.window is None]

    @property
    def full_group(self) -> GpuGroupPlanner | None:
        """The first group without a window, whose blocks decide on a step's shape."""
        return self.groups[self._full[0]] if self._full else None

    def split(self, num_decodes: int, batch: int, beside_chunks: bool = False) -> tuple[int, Bounds]:
        """``LaunchShapes.split`` for the blocks of the last command, those of layers without a window.

        The rounding of a request's attention depends on how much its neighbours hold, as that of its matrix products
        depends on the batch size; not in a deterministic engine.
        """
        if self.full_group is None:
            return 1, NO_ITEMS
        counts = [self.tables.num_blocks[number] for number in self._full]
        most = counts[0] if len(counts) == 1 else [max(each) for each in zip_longest(*counts, fillvalue=0)]
        return self.full_group.shapes.split(most, num_decodes, batch, beside_chunks)

    def window_kernels(self, batch: int) -> list[Hashable]:
        """The name of what layers with a window launch for ``batch`` requests, which depends on their number alone."""
        return [] if len(self._full) == len(self.groups) else [("windows", batch)]

    def plan_chunks(self, rows: list[int], starts: list[int], counts: list[int]) -> ChunkPlans:
        """The plans, on the host, of chunks of ``counts`` tokens from ``starts`` of the requests in ``rows``."""
        return [group.plan_chunks(rows, starts, counts, self.tile_tokens) for group in self.groups]

    def plan_last(self, plans: ChunkPlans, rows: Tensor, on_device: ChunkPlans) -> LastChunks | None:
        """The last layer's plan, on the device, where results are read from the rows [M] of ``plans`` alone.

        ``on_device``: the same plans as ``plans``, which are on the host.
        """
        if self._last is None:
            return None
        group, layer = self._last
        return LastChunks(group, layer, on_device[group].with_tiles_of(plans[group].of_rows(rows)))

    def begin(
        self,
        step_input: Tensor,
        num_tokens: int,
        num_decodes: int,
        bounds: Bounds | None,
        chunks: ChunkPlans | None = None,
        state_chunks: ChunkWork | None = None,
        last: LastChunks | None = None,
    ) -> tuple[Placed, AttentionBatch]:
        """Brings the tables up to date and plans a step whose input is on the device, single tokens first.

        ``bounds``: the launch shape of the single tokens, if there are any;  ``chunks``: the plans of the others, on
        the device, ``state_chunks`` that of their states, if layers have some, and ``last`` that of the last layer, if
        it is another.
        """
        tables = self.tables
        update(tables.block_words[0], step_input, num_tokens)
        found, steps = list[Placed](), list[GpuAttention]()
        for number, group in enumerate(self.groups):
            placed = place(group.words, step_input, num_tokens, tables.last_tokens, group.row_nbytes)
            decode = None
            if bounds is not None:
                decode = group.plan_decodes(step_input, placed, num_decodes, bounds)
            found.append(placed)
            work = None if chunks is None else chunks[number]
            own = last if last is not None and last.group == number else None
            steps.append(GpuAttention(group, placed.token_rows, num_decodes, decode, work, own))
        attention = over_groups(self._ladder, steps)
        if self.states is None:
            return found[0], attention
        decodes = None if bounds is None else self.states.plan_steps(found[0], num_decodes)
        return found[0], HybridStep(attention, GpuStates(self.states, num_decodes, decodes, state_chunks))


class GpuGroupPlanner:
    """Planner of one group, whose layers all have its window."""

    def __init__(
        self,
        memory: Tensor,
        tables: GroupWords,
        words: BlockWords,
        group: LayerGroup,
        specs: Sequence[AttentionSpec],
        num_multiprocessors: int,
        deterministic: bool = False,
    ):
        """``words``: those of ``tables`` on the device."""
        self.memory, self.tables, self.words, self.spec, self.specs = memory, tables, words, group.spec, specs
        self.window, self.row_nbytes = group.visible, group.row_nbytes
        self.num_kv_heads = group.widest.shape.num_kv_heads
        self.pages = page_layouts(group)
        self.layers = [LayerFormats.of(pages, memory.device) for pages in self.pages]
        # Dense pages are rows of one token and head.
        head_dim = group.widest.shape.head_dim
        self.kv_rows = memory.view(group.widest.dtype).view(-1, head_dim)
        item_blocks = STEADY_BLOCKS if deterministic else None
        self.shapes = LaunchShapes(self.num_kv_heads, head_dim, num_multiprocessors, item_blocks)

    def split_window(self, batch: int) -> tuple[int, Bounds]:
        """The most blocks of a work item and the launch shape under the group's window."""
        assert self.window is not None
        return self.shapes.split_window(self.window, self.spec.block_tokens, len(self.spec.rungs), batch)

    def plan_decodes(self, step_input: Tensor, placed: Placed, number: int, bounds: Bounds) -> DecodeWork:
        """The plan of the first ``number`` tokens; ``bounds`` are for layers without a window."""
        size = None
        if self.window is not None:
            size, bounds = self.split_window(number)
        rows, lengths = placed.rows[:number], placed.lengths[:number]
        return plan_decode(self.words, step_input, rows, lengths, len(self.spec.rungs), bounds, self.window, size)

    def plan_chunks(self, rows: list[int], starts: list[int], counts: list[int], tile_tokens: int) -> PrefillWork:
        """See ``GpuAttentionPlanner``."""
        group = self.spec
        entries = [
            group.num_token_slots + group.blocks_for(start + count) for start, count in zip(starts, counts, strict=True)
        ]
        addresses, rungs = self.tables.entries(rows, max(entries))
        for row, end in zip(rungs.numpy(), entries, strict=True):
            row[end:] = ABSENT
        return PrefillWork.build(
            addresses,
            rungs,
            torch.tensor(starts),
            torch.tensor(counts),
            num_rungs=len(group.rungs),
            tile_tokens=tile_tokens,
            sink_tokens=group.sink,
            block_tokens=group.block_tokens,
            banks=self.tables.banks(rows),
            window=self.window,
        )


class GpuAttention:
    """Attention of a step's tokens in one group: K and V are written first, then both kernels read their pages."""

    def __init__(
        self,
        planner: GpuGroupPlanner,
        token_rows: Tensor,
        num_decodes: int,
        decode: DecodeWork | None,
        chunks: PrefillWork | None,
        last: LastChunks | None = None,
    ):
        """``decode``: the plan of the step's single tokens;  ``chunks``: that of the others, ``last`` in one layer."""
        self._token_rows, self._kv_rows = token_rows, planner.kv_rows
        self._memory, self._pages, self._layers = planner.memory, planner.pages, planner.layers
        self._specs = planner.specs
        self._num_kv_heads = planner.num_kv_heads
        self._num_decodes, self._decode, self._chunks, self._last = num_decodes, decode, chunks, last

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch``. Rows of padding come out as zeros, those behind chunks or left out as anything."""
        n, heads, spec = self._num_decodes, self._num_kv_heads, self._specs[layer]
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        q = rope_kv_write(qkv, *rotation, self._token_rows, self._kv_rows, layer, heads, weight, eps, key_basis)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rule, chunks = (spec.softcap, null_logits), self._chunks
        if self._last is not None and self._last.layer == layer:
            chunks = self._last.work
        if self._decode is not None:
            paged_decode(q[:n], self._memory, self._decode, self._layers[layer], spec.scale, out[:n], None, *rule)
        if chunks is not None and len(chunks.tiles):
            paged_prefill(q[n:], self._memory, chunks, self._pages[layer], spec.scale, out[n:], None, *rule)
        return out


def page_layouts(group: LayerGroup) -> list[list[PageLayout]]:
    """Page layouts, layer by layer, on each rung."""
    return [list(pages) for pages in zip(*(rung.layout.pages for rung in group.rungs), strict=True)]
