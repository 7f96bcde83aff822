"""The KV cache: one uint8 tensor, the books of who owns which part of it, and attention over it for one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from qkv_engine.kernels.kv_write import kv_write
from qkv_engine.kernels.located import LayerPages, Located
from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode
from qkv_engine.kernels.paged_prefill import paged_prefill
from qkv_engine.kernels.transfer import transfer
from qkv_engine.scheduler import ScheduledBatch, ScheduledRequest

from ..config import BLOCK_TOKENS
from ..errors import CapacityError
from .arena import Arena
from .formats.dense import Dense
from .ladder import Ladder
from .table import SINK, Block, BlockTables, Move

MAX_SLAB_BLOCKS = 16  # widest blocks a slab holds: enough that narrow slots leave little of a slab unused
MIN_SLABS = 24  # few slabs make the reserve and the partly filled ones dear


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


class KVCache:
    """KV memory of an engine: allocated once at start, never grown. ``tables`` is what the scheduler sees of it."""

    def __init__(self, ladder: Ladder, nbytes: int, device: torch.device):
        block_nbytes = ladder.widest.block_nbytes
        num_blocks = nbytes // block_nbytes
        has_steps = len(ladder.rungs) > 1
        least = (1 + 2 * has_steps + bool(ladder.sink)) * block_nbytes
        if nbytes < least:
            raise CapacityError(
                f"no room for one block of {BLOCK_TOKENS} tokens, its sink and the reserve",
                field="kv_memory",
                value=nbytes,
                remedy=f"Give at least {least} bytes",
            )
        slab_blocks = max(1, min(MAX_SLAB_BLOCKS, num_blocks // MIN_SLABS))
        self.ladder = ladder
        self.arena = Arena(nbytes, slab_blocks * block_nbytes, reserve=int(has_steps))
        self.tables = BlockTables(self.arena, ladder)
        self.memory = torch.empty(self.arena.nbytes, dtype=torch.uint8, device=device)
        self.peak: Counter[str] = Counter()  # bytes by kind when the most were in use
        self._layers = _layer_views(self.memory, ladder)

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self.memory.nbytes

    def reset(self) -> None:
        """Forgets every block: the books are made anew, the tensor stays."""
        self.arena = Arena(self.arena.nbytes, self.arena.slab_nbytes, self.arena.reserve)
        self.tables = BlockTables(self.arena, self.ladder)

    def bytes_in_use(self) -> Counter[str]:
        """Live blocks by kind of byte, "codes", "meta" (with all padding) and "dense", and their KV "elements"."""
        found: Counter[str] = Counter()
        for number, count in self.tables.num_blocks.items():
            if number == SINK:
                share = self.ladder.sink_tokens / BLOCK_TOKENS
                found["dense"] += count * self.ladder.sink_nbytes
                found["elements"] += int(count * share * self.ladder.widest.num_elements)
            else:
                rung = self.ladder.rungs[number]
                found["codes"] += count * rung.codes_nbytes
                found["meta"] += count * rung.meta_nbytes
                found["dense"] += count * rung.dense_nbytes
                found["elements"] += count * rung.num_elements
        return found

    def note_peak(self) -> None:
        """Remembers what is in use if it is the most so far."""
        if self.arena.used_nbytes > self.peak["codes"] + self.peak["meta"] + self.peak["dense"]:
            self.peak = self.bytes_in_use()

    def apply_moves(self) -> set[Block]:
        """Carries out what the tables noted since the last step; returns blocks found to hold non-finite values."""
        bad: set[Block] = set()
        waves, self.tables.waves = self.tables.waves, []
        for wave in waves:
            for (old, new), moves in _by_rungs(wave):
                finite = self._move(list(moves), old, new)
                bad.update(move.block for move, ok in finite if not ok)
        for slot in self.tables.take_fresh():
            # Attention masks unwritten tokens by adding -inf, which does not hide a NaN left by an earlier owner.
            self.memory[slot.address : slot.address + slot.nbytes].zero_()
        self.note_peak()
        return bad

    def begin_step(self, batch: ScheduledBatch) -> KVStep:
        """What the attention layers need of ``batch``, computed once. Single tokens come first in the batch."""
        num_decodes = sum(1 for item in batch.items if item.num_tokens == 1)
        plan = None
        if num_decodes:
            located = [self._locate(item, item.end) for item in batch.items[:num_decodes]]
            plan = DecodePlan.build(located, self.memory.device)
        chunks, first = [], num_decodes
        for item in batch.items[num_decodes:]:
            chunks.append(Chunk(first, first + item.num_tokens, self._locate(item, item.start)))
            first += item.num_tokens
        return KVStep(self._layers, self._writes(batch), num_decodes, plan, chunks)

    def _move(self, moves: list[Move], old: int, new: int) -> Iterable[tuple[Move, bool]]:
        src, dst = [move.src for move in moves], [move.dst for move in moves]
        if old == SINK:
            layout, nbytes = self.ladder.widest.layout, self.ladder.sink_nbytes
            for a, b in zip(src, dst, strict=True):
                self.memory[b : b + nbytes] = self.memory[a : a + nbytes]
            return ()
        layout, target = self.ladder.rungs[old].layout, self.ladder.rungs[new].layout
        finite = transfer(self.memory, src, dst, layout, target)
        return () if finite is None else zip(moves, finite.tolist(), strict=True)

    def _locate(self, item: ScheduledRequest, length: int) -> Located:
        """Where the first ``length`` tokens of a request lie."""
        table, sink, dense = self.tables[item.request.request_id], self.ladder.sink, self.ladder.widest.block_nbytes
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

    def _writes(self, batch: ScheduledBatch) -> list[Write]:
        """Where the K and V of the step's tokens go."""
        shape, sink = self.ladder.widest.shape, self.ladder.sink
        row_nbytes = self.ladder.widest.layout.sides[0].nbytes // (shape.num_kv_heads * shape.num_tokens)
        rows: dict[bool, list[int]] = {True: [], False: []}
        tokens: dict[bool, list[int]] = {True: [], False: []}
        first = 0
        for item in batch.items:
            table = self.tables[item.request.request_id]
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
        for is_sink, num_tokens in ((False, BLOCK_TOKENS), (True, self.ladder.sink_tokens)):
            if rows[is_sink]:
                heads = torch.arange(shape.num_kv_heads) * num_tokens
                where = (torch.tensor(rows[is_sink])[:, None] + heads).flatten().to(self.memory.device)
                some = None
                if len(tokens[is_sink]) < first:
                    some = torch.tensor(tokens[is_sink], device=self.memory.device)
                writes.append(Write(where, some, is_sink))
        return writes


class KVStep:
    """One step's view of the cache: the ``AttentionBatch`` a model's layers call."""

    def __init__(
        self,
        layers: list[LayerView],
        writes: list[Write],
        num_decodes: int,
        plan: DecodePlan | None,
        chunks: list[Chunk],
    ):
        self._layers, self._writes = layers, writes
        self._num_decodes, self._plan, self._chunks = num_decodes, plan, chunks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores ``k`` and ``v``, then attends: q [N, HQ, D], k and v [N, H, D] after rope -> [N, HQ, D]."""
        view, n, scale = self._layers[layer], self._num_decodes, q.shape[-1] ** -0.5
        for write in self._writes:
            k_rows, v_rows = view.sink_rows if write.is_sink else view.block_rows
            kv_write(write.rows, k if write.tokens is None else k[write.tokens], k_rows)
            kv_write(write.rows, v if write.tokens is None else v[write.tokens], v_rows)
        if not self._chunks and self._plan is not None:
            return paged_decode(q, view.pages, self._plan, scale)
        out = torch.empty_like(q)
        if self._plan is not None:
            out[:n] = paged_decode(q[:n], view.pages, self._plan, scale)
        for chunk in self._chunks:
            a, b = chunk.first, chunk.last
            out[a:b] = paged_prefill(q[a:b], k[a:b], v[a:b], view.pages, chunk.past, scale)
        return out


def _by_rungs(wave: list[Move]) -> Iterable[tuple[tuple[int, int], Iterable[Move]]]:
    def key(move: Move) -> tuple[int, int]:
        return move.old, move.new

    return groupby(sorted(wave, key=key), key=key)


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
        sinks = elements.view(-1, num_layers, 2, heads, ladder.sink_tokens, shape.head_dim)
    layouts = tuple(rung.layout for rung in ladder.rungs)

    def side_rows(layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        side = heads * num_tokens
        return rows[2 * layer * side :], rows[(2 * layer + 1) * side :]

    return [
        LayerView(
            LayerPages(i, memory, blocks[:, i], None if sinks is None else sinks[:, i], layouts),
            side_rows(i, BLOCK_TOKENS),
            side_rows(i, ladder.sink_tokens),
        )
        for i in range(num_layers)
    ]
