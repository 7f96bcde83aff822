"""The size of slabs: the best of all, counted block by block; books of any size begin in no time."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from qkv_engine.config import BLOCK_TOKENS, DENSE16, PRESETS, KVConfig, uniform_rung
from qkv_engine.kv.cache import MAX_SLAB_BLOCKS, KVCache, _best_arena
from qkv_engine.kv.ladder import Ladder, build_ladder

THREE = KVConfig(name="three", rungs=(DENSE16, *(uniform_rung(bits) for bits in (8, 4, 2))), sink=16, recent=300)


def ladder_of(config: KVConfig) -> Ladder:
    return build_ladder(config, num_layers=3, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def most_tokens(ladder: Ladder, num_slabs: int, slab_nbytes: int, rung: int) -> int:
    """Tokens of the longest request that fits on ``rung``, tried block by block."""
    wide, narrow = ladder.widest.block_nbytes, ladder.rungs[rung].block_nbytes
    blocks = tokens = 0
    while True:
        dense = min(blocks, 1 + -(-ladder.recent // BLOCK_TOKENS)) if rung else blocks
        slots = Counter({wide: dense})
        slots[narrow] += blocks - dense
        slots[ladder.sink_nbytes] += bool(ladder.sink)
        slabs = sum(-(-number // (slab_nbytes // size)) for size, number in slots.items() if number)
        if slabs > num_slabs - (len(ladder.rungs) - 1):
            return tokens
        blocks, tokens = blocks + 1, ladder.sink + blocks * BLOCK_TOKENS


def best_slab_blocks(ladder: Ladder, nbytes: int) -> int:
    """Widest blocks in a slab of the size whose arena holds the most bytes of KV over all rungs, the largest such."""
    block = ladder.widest.block_nbytes
    useful = {
        size: sum(
            most_tokens(ladder, nbytes // (size * block), size * block, number) * rung.token_nbytes
            for number, rung in enumerate(ladder.rungs)
        )
        for size in range(1, MAX_SLAB_BLOCKS + 1)
        if nbytes >= size * block
    }
    return max(useful, key=lambda size: (useful[size], size))


@pytest.mark.parametrize("config", [*PRESETS.values(), THREE], ids=lambda config: config.name)
def test_the_slab_is_the_one_that_wastes_least(config: KVConfig):
    ladder = ladder_of(config)
    block = ladder.widest.block_nbytes
    for blocks in (5, 6, 7, 9, 13, 16, 17, 25, 31, 33, 50):
        for rest in (0, block // 3, block - 1):
            arena = _best_arena(ladder, blocks * block + rest)
            assert arena.slab_nbytes == best_slab_blocks(ladder, blocks * block + rest) * block
            assert arena.num_slabs == (blocks * block + rest) // arena.slab_nbytes


def test_books_of_any_size_begin_with_no_slab_made():
    ladder = ladder_of(PRESETS["auto"])
    cache = KVCache(ladder, 900_000 * 2**30, torch.device("meta"))
    assert cache.arena.num_slabs > 10**8 and not cache.arena._slabs
    cache.tables.open("a", 2)
    assert cache.tables.reserve("a", 5 * BLOCK_TOKENS)
    assert len(cache.arena._slabs) == 2  # one for the sink, one for the blocks
    assert cache.tables.max_requests(10 * BLOCK_TOKENS, 2) > 10**8
