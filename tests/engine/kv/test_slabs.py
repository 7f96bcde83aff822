"""The size of slabs: the best of all, counted block by block; books of any size begin in no time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.config import BLOCK_TOKENS, DENSE16, KVConfig, RungConfig
from qkv_engine.device.layouts import build_ladder
from qkv_engine.errors import CapacityError
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.kv.arena import Arena
from qkv_engine.kv.reserve import reserve_nbytes
from qkv_engine.kv.slabs import MAX_SLAB_BLOCKS, least_nbytes, make_arena, make_tables
from qkv_engine.kv.spec import KVSpec, RungSize
from qkv_engine.kv.table import BlockTables
from qkv_engine.presets import PRESETS

from ...scheduler.common import make_group_spec, make_spec

THREE = KVConfig(name="three", rungs=(DENSE16, *(uniform_rung(bits) for bits in (8, 4, 2))), sink=16, recent=300)
SHARE = replace(THREE, name="share", recent_ratio=0.35)


def ladder_of(config: KVConfig) -> KVSpec:
    return build_ladder(config, num_layers=3, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16).spec


def expected_loss(ladder: KVSpec, nbytes: int, slab: int) -> float:
    """Bytes that hold no KV: reserve, half of what a slab of each size may leave free, mean rest of the rungs."""
    rungs = [rung.nbytes for rung in ladder.main.rungs]
    sizes = {*rungs, *(slot.nbytes for slot in ladder.main.slots)} - {rungs[0]}
    rests = [slab % size / slab for size in rungs[1:]]
    halves = sum((slab - slab // (slab // size)) / 2 for size in sizes)
    return reserve_nbytes([rungs], rungs[0], slab) + halves + nbytes * sum(rests) / len(rests)


# Of presets that differ in a sink or a group alone, one.
OTHERS = [
    config
    for config in PRESETS.values()
    if len(config.rungs) > 1
    and not config.name.endswith(("-g32", "-sink"))
    and config.name not in ("auto", "kivi-2", "patternkv", "xquant-1.28")
]


@pytest.mark.parametrize(
    "config",
    [
        *(PRESETS[name] for name in ("auto", "kivi-2", "patternkv", "xquant-1.28")),
        *(THREE, SHARE),
        *(pytest.param(config, marks=pytest.mark.slow) for config in OTHERS),
    ],
    ids=lambda config: config.name,
)
def test_of_all_slabs_the_chosen_one_wastes_least(config: KVConfig):
    """Tried with every multiple of the alignment. A slab no larger than the blocks that fill it when they step down."""
    ladder = ladder_of(config)
    block, first = (rung.nbytes for rung in ladder.main.rungs[:2])
    widest = max({first, *(slot.nbytes for slot in ladder.main.slots)} - {block})
    for blocks in (9, 100_000):
        nbytes = blocks * block + block // 3
        arena = make_arena(ladder, nbytes)
        sizes = range(ladder.main.align, MAX_SLAB_BLOCKS * block + 1, ladder.main.align)
        fitting = [size for size in sizes if size >= widest and size // first * block >= size]
        best = min(fitting, key=lambda size: (expected_loss(ladder, nbytes, size), size))
        assert (arena.slab_nbytes, arena.nbytes) == (best, nbytes // ladder.main.align * ladder.main.align)


def test_blocks_of_one_rung_fill_memory_without_slabs():
    ladder = ladder_of(PRESETS["bf16"])
    block = ladder.main.widest.nbytes
    arena = make_arena(ladder, 5 * block + block // 3)
    assert (arena.nbytes, arena.reserve_nbytes, arena.room(block)) == (5 * block, 0, 5)


def test_small_memory_has_small_slabs():
    """The demo model's shape under auto: a slab holds two blocks of 4 bits or one of 8; a slab of reserve."""
    ladder = build_ladder(PRESETS["auto"], num_layers=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16).spec
    for mib in (6, 12, 36, 384, 1024):
        arena = make_arena(ladder, mib * 2**20)
        assert (arena.slab_nbytes, arena.reserve_nbytes) == (548 * 2**10, 548 * 2**10)
    tables = BlockTables(make_arena(ladder, 12 * 2**20), ladder)
    # Of three blocks and a sink each: at 16 bits three, at 8 four, at 4 six; under bf16 four at 16.
    assert [tables.max_requests(32 + 3 * BLOCK_TOKENS, rung) for rung in range(3)] == [3, 4, 6]


def losses(arena: Arena, ladder: KVSpec, nbytes: int) -> list[float]:
    """Share of ``nbytes`` that holds no KV when all blocks stand on one rung: reserve and rests; for each rung."""
    return [1 - arena.room(rung.nbytes) * rung.nbytes / nbytes for rung in ladder.main.rungs]


@given(st.sets(st.integers(16_000, 147_000), min_size=1, max_size=15), st.integers(60 << 30, 100 << 30))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_large_arena_loses_little_however_many_rungs_there_are(sizes: set[int], nbytes: int):
    widest = 147_456 * 128  # 36 layers of 8 KV heads of dim 128 at 16 bits
    rungs = [widest, *(128 * size for size in sorted(sizes, reverse=True))]
    ladder = make_spec(
        tuple(RungSize(f"r{i}", size, 16.0) for i, size in enumerate(rungs)), sink=32, sink_nbytes=widest // 4
    )
    arena = make_arena(ladder, nbytes)
    lost = losses(arena, ladder, nbytes)
    assert sum(lost) / len(lost) < 0.03 and max(lost) < 0.1
    rng, tables = random.Random(nbytes), BlockTables(arena, ladder)
    tables.open("a", len(sizes))
    assert tables.reserve("a", 200 * BLOCK_TOKENS)
    for block in tables.main["a"].blocks:
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
    ladder = build_ladder(config, num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16).spec
    arena = make_arena(ladder, 80 * 2**30)
    lost = losses(arena, ladder, 80 * 2**30)
    assert round(arena.slab_nbytes / arena.block_nbytes, 1) == 10.4
    assert round(arena.reserve_nbytes / arena.slab_nbytes, 2) == 1.98
    assert round(sum(lost) / 12, 3) == 0.012 and round(max(lost), 3) == 0.023


@pytest.mark.parametrize("config", [*PRESETS.values(), THREE, SHARE], ids=lambda config: config.name)
def test_the_least_memory_is_exact(config: KVConfig):
    """A byte less is refused; with it a block fits on each rung beside an open one."""
    ladder = ladder_of(replace(config, recent=0, recent_ratio=0.0))
    least = least_nbytes(ladder)
    with pytest.raises(CapacityError, match="Give at least"):
        make_tables(ladder, least - 1)
    tables = make_tables(ladder, least)
    for rung in range(1, len(ladder.main.rungs)):
        assert tables.max_tokens(rung) >= ladder.main.sink + 2 * BLOCK_TOKENS


def test_the_least_memory_is_an_open_block_and_slabs_for_the_sink_a_narrow_block_and_the_reserve():
    assert least_nbytes(ladder_of(PRESETS["bf16"])) == ladder_of(PRESETS["bf16"]).main.widest.nbytes
    ladder = ladder_of(PRESETS["auto"])
    slab = ladder.main.rungs[1].nbytes
    assert least_nbytes(ladder) == ladder.main.widest.nbytes + 3 * slab


def test_books_of_any_size_begin_with_no_slab_made():
    ladder = ladder_of(PRESETS["auto"])
    tables = make_tables(ladder, 900_000 * 2**30)
    arena = tables.arena
    assert arena.nbytes // arena.slab_nbytes > 10**8 and not arena._slabs
    tables.open("a", 2)
    assert tables.reserve("a", 5 * BLOCK_TOKENS)
    assert len(arena._slabs) == 1 and len(arena._blocks) == 5  # a slab for the sink
    assert tables.max_requests(10 * BLOCK_TOKENS, 2) > 10**8


def gemma(visible: int | None = 512) -> KVSpec:
    """Layers of Gemma 3 1B in blocks of 128 tokens: 4 that see all, and 22 with a window."""
    rungs = [
        [RungSize(name, n * layers * 1024, 16.0) for name, n in (("dense16", 128), ("int8", 66))] for layers in (4, 22)
    ]
    window = make_group_spec(rungs[1][:1], floors=(0, 0), visible=visible)
    return make_spec(rungs[0], more_groups=(window,))


def test_slabs_hold_dense_blocks_of_other_groups():
    spec = gemma()
    block, window = (group.widest.nbytes for group in spec.groups)
    arena = make_arena(spec, 2**30)
    assert arena.block_nbytes == block and arena.slab_nbytes >= window
    assert arena.slab_nbytes // spec.main.rungs[1].nbytes * block >= arena.slab_nbytes
    assert arena.slab_nbytes % window * 20 < arena.slab_nbytes  # hardly any rest
    assert arena.reserve_nbytes < 3 * arena.slab_nbytes


def test_the_least_memory_holds_a_window():
    spec = gemma()
    window, least = spec.groups[1].widest.nbytes, least_nbytes(spec)
    with pytest.raises(CapacityError, match="no room for one block"):
        make_tables(spec, least - 1)
    tables = make_tables(spec, least)
    assert tables.max_tokens(1) >= 2 * BLOCK_TOKENS and least > 5 * window
    alone = KVSpec("window", spec.groups[1:], False, 0)
    assert least_nbytes(alone) == 5 * window and make_tables(alone, 5 * window).max_tokens(0, context=10**6) == 10**6


def test_capacity_grows_with_what_windows_do_not_keep():
    full, window = (make_tables(gemma(visible), 2**30).max_tokens(0, context=10**6) for visible in (None, 512))
    assert 6 * full < window < 7 * full  # 26 layers for each token, or 4
