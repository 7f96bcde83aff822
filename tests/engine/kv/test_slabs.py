"""The size of slabs: the best of all, counted block by block; books of any size begin in no time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.config import BLOCK_TOKENS, DENSE16, PRESETS, KVConfig, RungConfig, uniform_rung
from qkv_engine.errors import CapacityError
from qkv_engine.kv.arena import Arena
from qkv_engine.kv.cache import MAX_SLAB_BLOCKS, KVCache, _best_arena
from qkv_engine.kv.ladder import Ladder, build_ladder
from qkv_engine.kv.table import BlockTables, num_reserve_slabs

from ...scheduler.common import TinyLadder, TinyRung

THREE = KVConfig(name="three", rungs=(DENSE16, *(uniform_rung(bits) for bits in (8, 4, 2))), sink=16, recent=300)
SHARE = replace(THREE, name="share", recent_ratio=0.35)


def ladder_of(config: KVConfig) -> Ladder:
    return build_ladder(config, num_layers=3, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def most_tokens(ladder: Ladder, num_slabs: int, slab_nbytes: int, rung: int) -> int:
    """Tokens of the longest request that fits on ``rung``, tried block by block."""
    wide, narrow = ladder.widest.block_nbytes, ladder.rungs[rung].block_nbytes
    blocks = tokens = 0
    while True:
        computed = ladder.sink + (blocks - 1) * BLOCK_TOKENS  # when the last block begins
        older = computed - max(ladder.window.num_tokens, floor(ladder.window.ratio * computed))
        old = sum(ladder.sink + number * BLOCK_TOKENS <= older for number in range(1, blocks + 1)) if rung else 0
        slots = Counter({wide: blocks - old})
        slots[narrow] += old
        slots.update(slot.nbytes for slot in ladder.slots)
        slabs = sum(-(-number // (slab_nbytes // size)) for size, number in slots.items() if number)
        if slabs > num_slabs - num_reserve_slabs(len(ladder.rungs)):
            return tokens
        blocks, tokens = blocks + 1, ladder.sink + blocks * BLOCK_TOKENS


def useful(ladder: Ladder, nbytes: int, slab_nbytes: int) -> int:
    """Bytes that the longest requests take, one alone on each rung, in sum."""
    return sum(
        most_tokens(ladder, nbytes // slab_nbytes, slab_nbytes, number) * rung.block_nbytes
        for number, rung in enumerate(ladder.rungs)
    )


@pytest.mark.parametrize("config", [*PRESETS.values(), THREE, SHARE], ids=lambda config: config.name)
def test_the_slab_is_the_one_that_wastes_least(config: KVConfig):
    ladder = ladder_of(config)
    block = ladder.widest.block_nbytes
    for blocks in (5, 6, 9, 16, 17, 33):
        for rest in (0, block // 3, block - 1):
            nbytes = blocks * block + rest
            arena = _best_arena(ladder, nbytes)
            sizes = range(block, min(blocks, MAX_SLAB_BLOCKS) * block + 1, block)
            best = max(sizes, key=lambda size: (useful(ladder, nbytes, size), size))
            assert (arena.slab_nbytes, arena.num_slabs) == (best, nbytes // best)


def losses(arena: Arena, ladder: TinyLadder, nbytes: int) -> list[float]:
    """Share of ``nbytes`` that holds no KV when all blocks stand on one rung: reserve and rests; for each rung."""
    slabs = arena.num_slabs - arena.reserve
    return [1 - slabs * arena.per_slab(size) * size / nbytes for size in (rung.block_nbytes for rung in ladder.rungs)]


@given(st.sets(st.integers(16_000, 147_000), min_size=1, max_size=15), st.integers(60 << 30, 100 << 30))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_large_arena_loses_little_however_many_rungs_there_are(sizes: set[int], nbytes: int):
    widest = 147_456 * 128  # 36 layers of 8 KV heads of dim 128 at 16 bits
    rungs = [widest, *(128 * size for size in sorted(sizes, reverse=True))]
    ladder = TinyLadder(
        tuple(TinyRung(f"r{i}", size, 16.0) for i, size in enumerate(rungs)), sink=32, sink_nbytes=widest // 4
    )
    arena = _best_arena(ladder, nbytes)
    lost = losses(arena, ladder, nbytes)
    assert sum(lost) / len(lost) < 0.03 and max(lost) < 0.08
    rng, tables = random.Random(nbytes), BlockTables(arena, ladder)
    tables.open("a", len(sizes))
    assert tables.reserve("a", 200 * BLOCK_TOKENS)
    for block in tables["a"].blocks:
        tables.demote([(block, rng.randint(1, len(sizes)))])
    tables.check_integrity()


def test_twelve_rungs_of_an_8b_model_lose_as_much_as_the_page_says():
    formats = ("dense16", "dense16"), *((f"int{b}-channel-128", f"int{b}-token-128") for b in (8, 4, 2))
    rungs = []
    for number in range(12):  # layer by layer from 16 over 8 and 4 to 2 bits
        steps = round(number * 3 * 36 / 11)
        k, v = zip(*(formats[steps // 36 + (layer < steps % 36)] for layer in range(36)), strict=True)
        rungs.append(RungConfig(f"r{number}", k, v))
    config = KVConfig(name="twelve", rungs=tuple(rungs), sink=32)
    ladder = build_ladder(config, num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    arena = _best_arena(ladder, 80 * 2**30)
    lost = losses(arena, ladder, 80 * 2**30)
    assert arena.reserve == 2
    assert round(sum(lost) / 12, 3) == 0.016 and round(max(lost), 3) == 0.033


@pytest.mark.parametrize("config", [*PRESETS.values(), THREE, SHARE], ids=lambda config: config.name)
def test_the_least_memory_is_exact(config: KVConfig):
    """A byte less is refused; with it a block fits on each rung beside an open one."""
    ladder = ladder_of(replace(config, recent=0, recent_ratio=0.0))
    least = ladder.widest.block_nbytes * (1 + len(ladder.slots) + (0, 2, 3, 3)[len(ladder.rungs) - 1])
    with pytest.raises(CapacityError, match="Give at least"):
        KVCache(ladder, least - 1, torch.device("meta"))
    tables = KVCache(ladder, least, torch.device("meta")).tables
    for rung in range(1, len(ladder.rungs)):
        assert tables.max_tokens(rung) >= ladder.sink + 2 * BLOCK_TOKENS


def test_books_of_any_size_begin_with_no_slab_made():
    ladder = ladder_of(PRESETS["auto"])
    cache = KVCache(ladder, 900_000 * 2**30, torch.device("meta"))
    assert cache.arena.num_slabs > 10**8 and not cache.arena._slabs
    cache.tables.open("a", 2)
    assert cache.tables.reserve("a", 5 * BLOCK_TOKENS)
    assert len(cache.arena._slabs) == 2  # one for the sink, one for the blocks
    assert cache.tables.max_requests(10 * BLOCK_TOKENS, 2) > 10**8
