"""The reserve: however many rungs a ladder has, blocks reach their floors, in any order, from a full arena."""

from __future__ import annotations

import random

import pytest

from qkv_engine.kv.reserve import reserve_nbytes
from qkv_engine.kv.spec import KVSpec, RungSize
from qkv_engine.kv.table import BlockTables

from ...scheduler.common import BLOCK, make_group_spec, make_space, make_spec


def ladder_of(rng: random.Random, num_rungs: int) -> KVSpec:
    sizes = sorted(rng.sample(range(8, 64), num_rungs), reverse=True)
    return make_spec(tuple(RungSize(f"r{i}", size, 16.0) for i, size in enumerate(sizes)))


def slab_of(rng: random.Random, ladder: KVSpec) -> int:
    """A slab of any size that steps down fill with no more bytes than they leave."""
    block, first = (rung.nbytes for rung in ladder.main.rungs[:2])
    return rng.choice([slab for slab in range(first, 4 * block + 1) if slab // first * block >= slab])


def reserve_of(rungs: list[int], slab_nbytes: int, num_floors: int = 1) -> int:
    """The reserve for one group."""
    return reserve_nbytes([rungs], rungs[0], slab_nbytes, [num_floors])


def fill(rng: random.Random, tables: BlockTables, floors: list[int], num_turns: int) -> None:
    """Has a request of each floor take blocks in turns, while some blocks step down."""
    for name, floor in enumerate(floors):
        tables.open(str(name), floor)
    for _ in range(num_turns):
        name = str(rng.randrange(len(floors)))
        tables.reserve(name, tables.held(name) + 1)
        blocks = [block for block in tables.store.live_blocks() if block.rung < block.floor]
        if blocks and rng.random() < 0.3:
            block = rng.choice(blocks)
            tables.demote([(block, rng.randint(block.rung + 1, block.floor))])


def full_tables(rng: random.Random, ladder: KVSpec, floors: list[int]) -> BlockTables:
    """Requests that took in turns all that ordinary allocations may take, while some blocks stepped down."""
    block, slab = ladder.main.widest.nbytes, slab_of(rng, ladder)
    nbytes = slab * (2 * len(set(floors)) + 2) + rng.randint(2 * block, 30 * block)
    tables = make_space(nbytes / block, ladder, slab_blocks=slab / block).tables
    fill(rng, tables, floors, 1000)
    return tables


@pytest.mark.parametrize(("num_floors", "num_rungs"), [(1, 2), (1, 3), (1, 12), (3, 6), (4, 12)])
@pytest.mark.parametrize("seed", range(70))
def test_some_block_finds_a_slot_until_all_are_on_their_floors(seed: int, num_floors: int, num_rungs: int):
    rng = random.Random(seed)
    ladder, last = ladder_of(rng, num_rungs), num_rungs - 1
    floors = [0, *(rng.randint(1, last) if num_floors > 1 else last for _ in range(num_floors))]
    tables = full_tables(rng, ladder, floors)
    sizes, slab = [rung.nbytes for rung in ladder.main.rungs], tables.arena.slab_nbytes
    assert tables.arena.reserve_nbytes == reserve_of(sizes, slab, len(set(floors)) - 1)
    while True:
        waiting = [block for block in tables.store.live_blocks() if block.rung < block.floor]
        if not waiting:
            break
        rng.shuffle(waiting)
        done = sum(tables.demote([(block, block.rung + 1)]) for block in waiting)
        assert done, f"{len(waiting)} blocks above their floors, and none finds a slot"
        tables.check_integrity()


@pytest.mark.parametrize("num_floors", [1, 2])
@pytest.mark.parametrize("seed", [*range(40), 54, 183, 281, 512, 567, 703, 866, 1025, 1113])  # some fail with less
def test_blocks_of_two_groups_reach_their_floors(seed: int, num_floors: int):
    """Blocks of the recent window stay dense."""
    rng = random.Random(seed)
    ladders = [ladder_of(rng, rng.randint(2, 4)).main.rungs for _ in range(2)]
    last = max(map(len, ladders)) - 1
    groups = [make_group_spec(rungs, floors=[min(i, len(rungs) - 1) for i in range(last + 1)]) for rungs in ladders]
    spec = KVSpec("two", tuple(groups), False, last)
    floors = [last if num_floors == 1 else rng.randint(1, last) for _ in range(3)]
    tables, recent = two_full_tables(rng, spec, floors), set()
    for block in tables.store.live_blocks():
        if not block.rung and rng.random() < 0.2:
            recent.add(block)
    while waiting := [b for b in tables.store.live_blocks() if b.rung < b.floor and b not in recent]:
        rng.shuffle(waiting)
        assert sum(tables.demote([(block, block.rung + 1)]) for block in waiting), "no block finds a slot"
        tables.check_integrity()


def two_full_tables(rng: random.Random, spec: KVSpec, floors: list[int]) -> BlockTables:
    """Requests that took turns, while blocks stepped down."""
    block, widest = spec.main.widest.nbytes, max(group.widest.nbytes for group in spec.groups)
    slabs = [
        slab for slab in range(widest, 4 * widest + 1)
        if all(slab // group.rungs[1].nbytes * block >= slab for group in spec.groups if group.widest.nbytes == block)
    ]  # fmt: skip
    slab = rng.choice(slabs)
    nbytes = slab * 12 + rng.randint(2 * block, 30 * block)
    tables = make_space(nbytes / block, spec, slab_blocks=slab / block).tables
    fill(rng, tables, floors, 200)
    return tables


def test_the_reserve_is_a_slab_and_what_slabs_of_rungs_above_the_floor_leave_free():
    assert reserve_of([16], 16) == 0
    assert reserve_of([16, 4], 16) == 16  # whatever fits in a slab, blocks on the floor fill it
    assert reserve_of([16, 8, 4], 8) == 8  # one block of 8 fills a slab
    assert reserve_of([16, 8, 4], 16) == 16 + 8  # one of two blocks of 8 may be missing
    assert reserve_of([16, 9, 4], 40) == 40 + 30  # three of four, and their rest
    assert reserve_of([16, 8, 4], 16, 2) == 16 + 12  # blocks of 4 with a floor of their own
    assert reserve_of([16, 8, 4, 2], 16, 2) == 16 + 14 + 12
    assert reserve_of([16, 8, 4, 2], 16, 3) == 16 + 14 + 12  # one narrower rung has no slab that is begun


def test_the_reserve_for_groups_counts_what_the_others_may_have_begun():
    two = [16, 8, 4], [24, 12]
    # A slab of 48; sizes leave 40, 44, 24 (dense in slabs) and 36. One group is stuck, the other is on its floors.
    assert reserve_nbytes(two, 16, 48) == 48 + max(40 + 36, 0 + 44) + 24
    assert reserve_nbytes(two, 16, 48, [2, 1]) == 48 + max(44 + 36, 0 + 44 + 40) + 24
    assert reserve_nbytes([[16], [24]], 16, 48) == 0
    assert reserve_nbytes([[16, 8, 4], [16]], 16, 48) == reserve_of([16, 8, 4], 48) == 48 + 40


def test_the_reserve_follows_the_floors_of_those_that_hold_blocks():
    ladder = ladder_of(random.Random(0), 12)
    tables = make_space(80, ladder).tables
    sizes, slab = [rung.nbytes for rung in ladder.main.rungs], tables.arena.slab_nbytes

    def reserve(num_floors: int) -> int:
        return reserve_of(sizes, slab, num_floors)

    least = tables.arena.reserve_nbytes
    for name, floor in (("a", 11), ("pinned", 0), ("b", 11), ("c", 3), ("d", 7)):
        tables.open(name, floor)
    assert (least, tables.arena.reserve_nbytes) == (reserve(1), reserve(3)) and reserve(1) < reserve(3)
    for name in "bcd":
        tables.release(name)
    assert tables.arena.reserve_nbytes == reserve(1)


def test_a_block_goes_on_to_the_next_rung_that_has_a_slot_and_else_stays():
    sizes = (16, 12, 9, 4)
    ladder = make_spec(tuple(RungSize(f"r{i}", size, 16.0) for i, size in enumerate(sizes)))
    tables = make_space(4, ladder).tables
    tables.open("a", 3)
    tables.arena.reserve_nbytes = 0
    assert tables.reserve("a", 3 * BLOCK)
    first, second, third = tables.main["a"].blocks
    assert tables.demote([(first, 3)]) == 1
    assert tables.arena.allocate(16) is not None  # nothing is free but slots of the narrowest size
    second.floor = 2
    assert tables.demote([(second, 1), (third, 1)]) == 1
    assert [block.rung for block in (first, second, third)] == [3, 0, 3]
