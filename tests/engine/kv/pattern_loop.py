"""Scheduler and cache as the engine's core runs them, with K and V that are functions of a request's tokens alone.

So whatever a block's bytes depend on besides them shows: a model's K and V differ in the last bits with the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS, KVConfig
from qkv_engine.device.cache import KVCache
from qkv_engine.device.layouts import build_ladder
from qkv_engine.device.mover import Mover
from qkv_engine.kernels.formats.rows import page_rows
from qkv_engine.kv.block import Block
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.request import FinishReason, Request, SamplingParams
from qkv_engine.scheduler import Scheduler

LAYERS, KV_HEADS, HEAD_DIM, VOCAB_SIZE = 2, 2, 32, 50


class Snapshot(NamedTuple):
    """What a request has: its tokens, the bytes of its bank, and the rung and the sides' bytes of each sealed block."""

    token_ids: list[int]
    bank: bytes | None
    blocks: list[tuple[int, list[bytes]]]


class PatternLoop:
    """Serves requests step by step; ``ended`` has a snapshot of each."""

    def __init__(self, kv: KVConfig, num_blocks: int = 60, *, seqs: int = 16, budget: int = 512):
        shape = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        ladder = build_ladder(kv, **shape, dtype=torch.float32)
        self.cache = KVCache(ladder, num_blocks * ladder.widest.block_nbytes, torch.device("cpu"))
        self.cache.memory.fill_(0xFF)  # NaN in every element nobody wrote
        self.mover = Mover(self.cache.memory, ladder)
        self.scheduler = Scheduler(self.space(), max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.ended: dict[str, Snapshot] = {}

    def space(self) -> KVManager:
        return KVManager(self.cache.tables, PrefixCache(self.cache.tables, "model"))

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(name, prompt, params, max_tokens, floor=len(self.cache.ladder.rungs) - 1)
        self.scheduler.add(request)
        return request

    def run(self) -> dict[str, Snapshot]:
        while self.scheduler.has_work:
            self.step()
        assert self.cache.arena.used_nbytes == self.idle_nbytes()
        return self.ended

    def idle_nbytes(self) -> int:
        prefix = self.scheduler.space.prefix
        return 0 if prefix is None else prefix.idle.nbytes

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert not self.cache.apply_moves(self.mover)
        for item in batch.items:
            for position in range(item.start, item.end):
                self.element(item.request, position).copy_(kv_of(item.request.token_ids, position))
        for item in batch.items:
            request = item.request
            self.scheduler.computed(item)
            if not item.samples:
                continue
            self.scheduler.append_token(request, (7 * request.token_ids[-1] + len(request.token_ids)) % VOCAB_SIZE)
            if request.num_output_tokens == request.max_tokens:
                self.ended[request.request_id] = self.snapshot(request)
                self.scheduler.finish(request, FinishReason.LENGTH)
        self.cache.tables.check_integrity()

    def element(self, request: Request, position: int) -> Tensor:
        """K and V [layers, 2, H, D] of a token in a dense block or the sink."""
        table, sink = self.cache.tables.main[request.request_id], self.cache.ladder.sink
        index, offset = divmod(position - sink, BLOCK_TOKENS) if position >= sink else (0, position)
        block = table.blocks[index] if position >= sink else table.slots[0]
        assert block.rung <= 0
        slot, tokens = block.slot, BLOCK_TOKENS if position >= sink else sink
        elements = self.cache.memory[slot.address : slot.address + slot.nbytes].view(self.cache.ladder.widest.dtype)
        return elements.view(LAYERS, 2, KV_HEADS, tokens, HEAD_DIM)[:, :, :, offset]

    def snapshot(self, request: Request) -> Snapshot:
        table = self.cache.tables.main[request.request_id]
        blocks = [(block.rung, self.sides(block)) for block in table.blocks if block.rung]
        bank = None
        if table.bank is not None and blocks:
            slot = table.bank.block.slot
            bank = self.cache.memory[slot.address : slot.address + slot.nbytes].numpy().tobytes()
        return Snapshot(request.token_ids[:], bank, blocks)

    def sides(self, block: Block) -> list[bytes]:
        """Codes and metadata of all sides of a block, without padding."""
        found, where = [], torch.tensor([block.slot.address])
        for page in self.cache.ladder.rungs[block.rung].layout.pages:
            for rows in page_rows(self.cache.memory, where, page):
                found += [rows.codes.numpy().tobytes(), rows.meta.numpy().tobytes()]
        return found


def kv_of(token_ids: list[int], position: int) -> Tensor:
    """K and V [layers, 2, H, D] of a token: one of some directions, and a little of its position."""
    return TOKENS[token_ids[position]] + 0.3 * POSITIONS[position]


def _table(number: int, seed: int) -> Tensor:
    return torch.randn(number, LAYERS, 2, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


TOKENS, POSITIONS = _table(VOCAB_SIZE, 0), _table(2000, 1)
