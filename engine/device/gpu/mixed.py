"""Captured steps that process chunks of prompts beside single tokens.

Both parts are padded to few sizes. The plans of the chunks, of attention and of states, are made on the host and sent
to a fixed place in device memory, where the captured launches read them.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.kernels.block_tables import input_nwords
from qkv_engine.kernels.delta_net.cpu import CHUNK
from qkv_engine.kernels.delta_net.plan import ChunkWork
from qkv_engine.kernels.paged_decode.split import Bounds
from qkv_engine.kernels.paged_decode.triton import kernel_names
from qkv_engine.kernels.paged_prefill.plan import PrefillWork

from ...kv.spec import GroupSpec
from ..command import Tokens
from ..logits import CausalLM
from ..pinned import PinnedRing
from ..tables import DeviceTables
from .attention import ChunkPlans, GpuAttentionPlanner
from .graphs import Graphs

MAX_CHUNK_TOKENS = 1024  # of a captured step; with more, the device takes longer than the host takes to enqueue it
CHUNK_STEP = 128  # tokens between two captured sizes: rows of a tile of a matrix product, so fewer save nothing
MAX_ENTRIES = 16384  # block-table entries of all chunks together that the plan's buffer has room for
SPARE_TILES = 16  # query tiles beside those that are full
MAX_ITEMS = 64  # requests with states that chunks of a captured step are of; with more it is not captured


@dataclass(frozen=True, slots=True)
class MixedShape:
    """The key of a captured step: padded sizes, and the launch shapes of attention.

    ``num_items``: requests with states that the chunks are of; 0 where none has some.
    """

    num_decodes: int
    bounds: Bounds | None
    num_chunk_tokens: int
    num_tiles: int
    num_items: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the step's matrix products."""
        return self.num_decodes + self.num_chunk_tokens

    @property
    def kernels(self) -> list[Hashable]:
        """Names of the kernels that the step launches: those that depend on its rows have one name."""
        attention = [] if self.bounds is None else kernel_names(self.bounds, self.num_decodes)
        return [("mixed", self.num_rows), *attention]

    @property
    def num_chunks(self) -> int:
        """Chunks of delta-nets that there is room for: those of all items may end with one that is not full."""
        return self.num_chunk_tokens // CHUNK + self.num_items


class MixedSteps:
    """Owns the input, the chunks' plan and the hidden states of captured steps."""

    def __init__(
        self, model: CausalLM, tables: DeviceTables, planner: GpuAttentionPlanner, graphs: Graphs, max_num_seqs: int
    ):
        self._model, self._tables, self._planner, self._graphs = model, tables, planner, graphs
        self._most = padded_decodes(max_num_seqs) + MAX_CHUNK_TOKENS
        self._input = torch.zeros(input_nwords(self._most), dtype=torch.int64, device=tables.device)
        self._ring = PinnedRing(self._input)
        self._plans = [PlanBuffer(planner.tile_tokens, group.spec, tables.device) for group in planner.groups]
        self._states = None if planner.states is None else StateBuffer(planner.states.num_states, tables.device)
        self._hidden: Tensor | None = None  # [most, E], made by the first step

    def shape(
        self, num_decodes: int, num_chunk_tokens: int, plans: ChunkPlans, states: ChunkWork | None
    ) -> tuple[int, MixedShape] | None:
        """The most blocks of a work item and a step's shape, as the tables stand; ``None``: run operator by operator.

        A step has no shape if it has many tokens, or if its chunks see blocks on other rungs than the widest: such
        blocks are written out in launches whose number depends on that of the blocks.
        """
        if num_chunk_tokens > MAX_CHUNK_TOKENS or any(work.rungs != (0,) for work in plans):
            return None
        num_items = 0 if states is None else padded_items(len(states.items))
        if num_items > MAX_ITEMS:
            return None
        work = plans[0]  # all have the same tiles, and room for the same entries
        size = padded_chunk(num_chunk_tokens)
        num_tiles = least_tiles(size, work.tile_tokens)
        while num_tiles < len(work.tiles):  # many short chunks
            num_tiles *= 2
        if not all(buffer.holds(num_tiles, len(work.addresses)) for buffer in self._plans):
            return None
        item_blocks, bounds, batch = 1, None, padded_decodes(num_decodes)
        if num_decodes:
            item_blocks, bounds = self._planner.split(num_decodes, batch, beside_chunks=True)
        return item_blocks, MixedShape(batch, bounds, size, num_tiles, num_items)

    def run(
        self,
        item_blocks: int,
        shape: MixedShape,
        decodes: Tokens,
        chunks: Tokens,
        plans: ChunkPlans,
        states: ChunkWork | None,
    ) -> Tensor:
        """Hidden states [N, E] of single tokens and of chunks, without padding."""
        spare = self._tables.spare_row
        first, second = decodes.padded(shape.num_decodes, spare), chunks.padded(shape.num_chunk_tokens, spare)
        self._ring.send(self._tables.step_input(first.packed(second), item_blocks=item_blocks))
        for buffer, work in zip(self._plans, plans, strict=True):
            buffer.send(work)
        if self._states is not None and states is not None:
            self._states.send(states)
        self._graphs.run(shape, lambda: self._run(shape))
        assert self._hidden is not None
        end = shape.num_decodes + len(chunks.ids)
        if shape.num_decodes == len(decodes.ids):
            return self._hidden[:end]
        return torch.cat((self._hidden[: len(decodes.ids)], self._hidden[shape.num_decodes : end]))

    def capture(self, shape: MixedShape) -> None:
        """Captures a step, which is run with padding alone."""
        padding = Tokens.single().padded(shape.num_decodes + shape.num_chunk_tokens, self._tables.spare_row)
        self._ring.send(self._tables.step_input(padding.packed()))
        for buffer in self._plans:
            buffer.clear()
        if self._states is not None:
            self._states.clear()
        kernels = shape.kernels
        if shape.bounds is not None:
            kernels += self._planner.window_kernels(shape.num_decodes)
        self._graphs.capture(shape, lambda: self._run(shape), kernels)

    def _run(self, shape: MixedShape) -> None:
        """The device's work in a step up to ``_hidden``: the contents of a graph."""
        number = shape.num_decodes + shape.num_chunk_tokens
        plans = [buffer.work(shape.num_tiles) for buffer in self._plans]
        states = None if self._states is None else self._states.work(shape.num_items, shape.num_chunks)
        placed, step = self._planner.begin(self._input, number, shape.num_decodes, shape.bounds, plans, states)
        hidden = self._model(placed.input_ids, placed.positions, step)
        if self._hidden is None:
            self._hidden = hidden.new_empty(self._most, hidden.shape[1])
        self._hidden[:number].copy_(hidden)


class PlanBuffer:
    """A fixed place in device memory for the plan of chunks that see blocks on the widest rung alone.

    The words [n] int64 hold tiles [M, 3] and runs [M, 4] int32, then addresses; positions have a place of their own.
    Tiles of padding have no tokens.
    """

    def __init__(self, tile_tokens: int, group: GroupSpec, device: torch.device):
        self._tile_tokens, self._group = tile_tokens, group
        self._max_tiles = 2 * (MAX_CHUNK_TOKENS // tile_tokens + SPARE_TILES)  # an even number
        words = torch.zeros(7 * self._max_tiles // 2 + MAX_ENTRIES, dtype=torch.int64, device=device)
        self._ring = PinnedRing(words)
        numbers, self._addresses = words[:-MAX_ENTRIES].view(torch.int32), words[-MAX_ENTRIES:]
        self._tiles = numbers[: 3 * self._max_tiles].view(-1, 3)
        self._runs = numbers[3 * self._max_tiles :].view(1, -1, 4)
        self._no_blocks = numbers[:0]  # none is written out as a dense page
        self._positions: Tensor | None = None
        if group.visible is not None:
            words = torch.zeros(MAX_ENTRIES // 2, dtype=torch.int64, device=device)
            self._positions, self._positions_ring = words.view(torch.int32), PinnedRing(words)

    def holds(self, num_tiles: int, num_entries: int) -> bool:
        """Whether a plan of that size has room."""
        return num_tiles <= self._max_tiles and num_entries <= MAX_ENTRIES

    def send(self, work: PrefillWork) -> None:
        """Enqueues a copy of a plan that is on the host."""
        numbers = torch.zeros(7 * self._max_tiles, dtype=torch.int32)
        numbers[: work.tiles.numel()] = work.tiles.flatten()
        first_run = 3 * self._max_tiles
        numbers[first_run : first_run + work.runs[0].numel()] = work.runs[0].flatten()
        self._ring.send(array("q", numbers.view(torch.int64).tolist() + work.addresses.tolist()))
        if work.positions is not None:
            positions = torch.zeros(len(work.positions) + 1 & -2, dtype=torch.int32)
            positions[: len(work.positions)] = work.positions
            self._positions_ring.send(array("q", positions.view(torch.int64).tolist()))

    def clear(self) -> None:
        """Enqueues a plan without tiles."""
        self._ring.send(array("q", bytes(8 * (7 * self._max_tiles // 2))))

    def work(self, num_tiles: int) -> PrefillWork:
        """The plan with its first ``num_tiles`` tiles; its tensors are the fixed place."""
        tiles, runs = self._tiles[:num_tiles], self._runs[:, :num_tiles]
        return PrefillWork(
            self._addresses,
            tiles,
            runs,
            (self._no_blocks,),
            (0,),
            self._tile_tokens,
            self._group.sink,
            self._group.block_tokens,
            window=self._group.visible,
            positions=self._positions,
        )


class StateBuffer:
    """A fixed place in device memory for the plan of chunks of requests with states.

    The words [n] int64 are the states' [L, ``MAX_ITEMS``], then items and chunks as int32.
    """

    def __init__(self, num_states: int, device: torch.device):
        """``num_states``: L, those of a request."""
        self._num_states = num_states
        num_numbers = 4 * MAX_ITEMS + 3 * (MAX_CHUNK_TOKENS // CHUNK + MAX_ITEMS)  # an even number
        words = torch.zeros(num_states * MAX_ITEMS + num_numbers // 2, dtype=torch.int64, device=device)
        self._ring, self._work = PinnedRing(words), self._parts(words)
        self._padding = words.new_zeros(len(words), device="cpu")
        self._parts(self._padding).items[:, 2] = 1

    def send(self, work: ChunkWork) -> None:
        """Enqueues a copy of a plan that is on the host."""
        words = self._padding.clone()
        parts, number = self._parts(words), len(work.items)
        parts.words[:, :number], parts.items[:number] = work.words, work.items
        parts.chunks[: len(work.chunks)] = work.chunks
        self._ring.send(array("q", words.numpy().tobytes()))

    def clear(self) -> None:
        """Enqueues a plan of padding alone."""
        self._ring.send(array("q", self._padding.numpy().tobytes()))

    def work(self, num_items: int, num_chunks: int) -> ChunkWork:
        """The plan with its first items and chunks; its tensors are the fixed place."""
        words, items, chunks = self._work.words, self._work.items, self._work.chunks
        return ChunkWork(words[:, :num_items], items[:num_items], chunks[:num_chunks])

    def _parts(self, words: Tensor) -> ChunkWork:
        """Views of ``words`` with room for all."""
        num_words = self._num_states * MAX_ITEMS
        numbers = words[num_words:].view(torch.int32)
        items, chunks = numbers[: 4 * MAX_ITEMS].view(-1, 4), numbers[4 * MAX_ITEMS :].view(-1, 3)
        return ChunkWork(words[:num_words].view(-1, MAX_ITEMS), items, chunks)


def padded_items(number: int) -> int:
    """Room for ``number`` requests with states: 1, 4, 16 and so on."""
    size = 1
    while size < number:
        size *= 4
    return size


def least_tiles(num_tokens: int, tile_tokens: int) -> int:
    """Query tiles that a captured step with ``num_tokens`` tokens of chunks has room for at least."""
    return num_tokens // tile_tokens + SPARE_TILES


def padded_decodes(number: int) -> int:
    """Rows for ``number`` single tokens beside chunks: none, 16, 32, 64, and from there on multiples of 64."""
    if number == 0:
        return 0
    return max(16, 1 << (number - 1).bit_length()) if number <= 64 else -(-number // 64) * 64


def padded_chunk(number: int) -> int:
    """Rows for ``number`` tokens of chunks: 64, or a multiple of ``CHUNK_STEP``."""
    return 64 if number <= 64 else -(-number // CHUNK_STEP) * CHUNK_STEP
