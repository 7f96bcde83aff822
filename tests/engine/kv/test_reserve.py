"""The reserve: however many rungs a ladder has, blocks reach their floors, in any order, from a full arena."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qkv_engine.kv.table import BlockTables, num_reserve_slabs

from ...scheduler.common import BLOCK, TinyLadder, TinyRung, make_space


def ladder_of(rng: random.Random, num_rungs: int) -> TinyLadder:
    sizes = sorted(rng.sample(range(8, 64), num_rungs), reverse=True)
    return TinyLadder(tuple(TinyRung(f"r{i}", size, 16.0) for i, size in enumerate(sizes)))


def full_tables(rng: random.Random, ladder: TinyLadder, floors: list[int]) -> BlockTables:
    """Requests that took in turns all that ordinary allocations may take, while some blocks stepped down."""
    slab_blocks = rng.randint(1, 4)
    tables = make_space(slab_blocks * rng.randint(len(set(floors)) + 4, 16), ladder, slab_blocks=slab_blocks).tables
    for name, floor in enumerate(floors):
        tables.open(str(name), floor)
    for _ in range(1000):
        name = str(rng.randrange(len(floors)))
        tables.reserve(name, tables.held(name) + 1)
        blocks = [block for block in tables.live_blocks() if block.rung < block.floor]
        if blocks and rng.random() < 0.3:
            block = rng.choice(blocks)
            tables.demote([(block, rng.randint(block.rung + 1, block.floor))])
    return tables


@pytest.mark.parametrize(("num_floors", "num_rungs"), [(1, 2), (1, 3), (1, 12), (3, 6), (4, 12)])
@pytest.mark.parametrize("seed", range(70))
def test_some_block_finds_a_slot_until_all_are_on_their_floors(seed: int, num_floors: int, num_rungs: int):
    rng = random.Random(seed)
    ladder, last = ladder_of(rng, num_rungs), num_rungs - 1
    floors = [0, *(rng.randint(1, last) if num_floors > 1 else last for _ in range(num_floors))]
    tables = full_tables(rng, ladder, floors)
    assert tables.arena.reserve == num_reserve_slabs(last + 1, len(set(floors)) - 1)
    while True:
        waiting = [block for block in tables.live_blocks() if block.rung < block.floor]
        if not waiting:
            break
        rng.shuffle(waiting)
        done = sum(tables.demote([(block, block.rung + 1)]) for block in waiting)
        assert done, f"{len(waiting)} blocks above their floors, and none finds a slot"
        tables.check_integrity()


def test_the_reserve_follows_the_floors_of_those_that_hold_blocks():
    ladder = ladder_of(random.Random(0), 12)
    tables = make_space(40, ladder).tables
    least = tables.arena.reserve
    for name, floor in (("a", 11), ("pinned", 0), ("b", 11), ("c", 3), ("d", 7)):
        tables.open(name, floor)
    assert (least, tables.arena.reserve) == (2, 4)
    for name in "bcd":
        tables.release(name)
    assert tables.arena.reserve == 2
    for floor in range(1, 12):
        tables.open(f"floor {floor}", floor)
    assert tables.arena.reserve == 11  # a slab for each narrower rung is always enough


def test_a_block_goes_on_to_the_next_rung_that_has_a_slot_and_else_stays():
    sizes = (16, 12, 9, 4)
    ladder = replace(TinyLadder(tuple(TinyRung(f"r{i}", size, 16.0) for i, size in enumerate(sizes))))
    tables = make_space(5, ladder).tables  # two slabs in reserve
    tables.open("a", 3)
    assert tables.reserve("a", 3 * BLOCK)
    first, second, third = tables["a"].blocks
    assert tables.demote([(first, 3)]) == 1
    tables.arena.reserve = 0
    others = [tables.arena.allocate(16) for _ in range(2)]  # nothing is free but slots of the narrowest size
    assert None not in others
    second.floor = 2
    assert tables.demote([(second, 1), (third, 1)]) == 1
    assert [block.rung for block in (first, second, third)] == [3, 0, 3]
