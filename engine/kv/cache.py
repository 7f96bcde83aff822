"""The KV cache: one uint8 tensor, the books of who owns which part of it, and attention over it for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.kernels.kv_write import kv_write
from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode
from qkv_engine.kernels.paged_prefill import paged_prefill
from qkv_engine.scheduler import ScheduledBatch

from ..config import BLOCK_TOKENS
from ..errors import CapacityError
from ..request import KVUsage
from .arena import Arena
from .formats.dense import Dense
from .ladder import Ladder
from .table import BlockTables

MAX_SLAB_BLOCKS = 16  # widest blocks a slab holds; few enough that a small arena still has many slabs


@dataclass(frozen=True)
class LayerView:
    """One layer's part of the arena: ``pages`` [S, 2, H, T, D] by slot; ``k_rows``, ``v_rows`` [R, D] by token row."""

    pages: Tensor
    k_rows: Tensor
    v_rows: Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows ``first:last`` of the step's tokens: a chunk of one request, whose earlier blocks lie in slots ``past``."""

    first: int
    last: int
    start: int
    past: Tensor


class KVCache:
    """KV memory of an engine: allocated once at start, never grown. ``tables`` is what the scheduler sees of it."""

    def __init__(self, ladder: Ladder, nbytes: int, device: torch.device):
        block_nbytes = ladder.widest.block_nbytes
        num_blocks = nbytes // block_nbytes
        if num_blocks < 1:
            raise CapacityError(
                f"no room for one block of {BLOCK_TOKENS} tokens, which takes {block_nbytes} bytes",
                field="kv_memory",
                value=nbytes,
                remedy=f"Give at least {block_nbytes} bytes",
            )
        slab_blocks = max(1, min(MAX_SLAB_BLOCKS, num_blocks // 64))
        self.ladder = ladder
        self.arena = Arena(nbytes, slab_blocks * block_nbytes)
        self.tables = BlockTables(self.arena, block_nbytes)
        self.memory = torch.empty(self.arena.nbytes, dtype=torch.uint8, device=device)
        self._layers = _layer_views(self.memory, ladder)

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self.memory.nbytes

    def usage(self, request_id: str) -> KVUsage:
        """Where the blocks of a request stand now."""
        if request_id not in self.tables:
            return KVUsage()
        rung = self.ladder.widest
        return KVUsage({rung.name: len(self.tables[request_id].blocks)}, min(rung.k.bits, rung.v.bits))

    def begin_step(self, batch: ScheduledBatch) -> KVStep:
        """What the attention layers need of ``batch``, computed once. Single tokens come first in the batch."""
        device, block_nbytes = self.memory.device, self.tables.block_nbytes
        for slot in self.tables.take_fresh():
            # Attention masks unwritten tokens by adding -inf, which does not hide a NaN left by an earlier owner.
            self.memory[slot.address : slot.address + slot.nbytes].zero_()
        slots = [[s.address // block_nbytes for s in self.tables[i.request.request_id].blocks] for i in batch.items]
        num_decodes = sum(1 for item in batch.items if item.num_tokens == 1)
        plan = None
        if num_decodes:
            lengths = [item.end for item in batch.items[:num_decodes]]
            plan = DecodePlan.build(slots[:num_decodes], lengths, BLOCK_TOKENS, device)
        chunks, first = [], num_decodes
        for item, table in zip(batch.items[num_decodes:], slots[num_decodes:], strict=True):
            past = torch.tensor(table[: -(-item.start // BLOCK_TOKENS)], dtype=torch.int64, device=device)
            chunks.append(Chunk(first, first + item.num_tokens, item.start, past))
            first += item.num_tokens
        return KVStep(self._layers, self._write_rows(batch, slots), num_decodes, plan, chunks)

    def _write_rows(self, batch: ScheduledBatch, slots: list[list[int]]) -> Tensor:
        """Row of each new token and KV head in a layer's ``k_rows`` and ``v_rows``, [N * H] int64."""
        shape = self.ladder.widest.shape
        slot_rows = self.ladder.widest.num_layers * 2 * shape.num_kv_heads * shape.num_tokens
        rows = [
            table[p // BLOCK_TOKENS] * slot_rows + p % BLOCK_TOKENS
            for item, table in zip(batch.items, slots, strict=True)
            for p in range(item.start, item.end)
        ]
        heads = torch.arange(shape.num_kv_heads) * shape.num_tokens
        return (torch.tensor(rows)[:, None] + heads).flatten().to(self.memory.device)


class KVStep:
    """One step's view of the cache: the ``AttentionBatch`` a model's layers call."""

    def __init__(
        self,
        layers: list[LayerView],
        rows: Tensor,
        num_decodes: int,
        plan: DecodePlan | None,
        chunks: list[Chunk],
    ):
        self._layers, self._rows = layers, rows
        self._num_decodes, self._plan, self._chunks = num_decodes, plan, chunks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores ``k`` and ``v``, then attends: q [N, HQ, D], k and v [N, H, D] after rope -> [N, HQ, D]."""
        view, n, scale = self._layers[layer], self._num_decodes, q.shape[-1] ** -0.5
        kv_write(self._rows, k, view.k_rows)
        kv_write(self._rows, v, view.v_rows)
        if not self._chunks and self._plan is not None:
            return paged_decode(q, view.pages, self._plan, scale)
        out = torch.empty_like(q)
        if self._plan is not None:
            out[:n] = paged_decode(q[:n], view.pages, self._plan, scale)
        for chunk in self._chunks:
            a, b = chunk.first, chunk.last
            out[a:b] = paged_prefill(q[a:b], k[a:b], v[a:b], view.pages, chunk.past, chunk.start, scale)
        return out


def _layer_views(memory: Tensor, ladder: Ladder) -> list[LayerView]:
    rung, shape = ladder.widest, ladder.widest.shape
    assert isinstance(rung.k, Dense)
    elements = memory.view(rung.k.dtype)
    rows = elements.view(-1, shape.head_dim)
    blocks = elements.view(-1, rung.num_layers, 2, shape.num_kv_heads, shape.num_tokens, shape.head_dim)
    side = shape.num_kv_heads * shape.num_tokens
    return [LayerView(blocks[:, i], rows[2 * i * side :], rows[(2 * i + 1) * side :]) for i in range(rung.num_layers)]
