"""Groups of layers on tiny arenas: what windows pass, exact counts and addresses, all groups or none."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from qkv_engine.kv.spec import GroupSpec, KVSpec, RungSize
from qkv_engine.kv.table import BlockTables

from ...scheduler.common import (
    BLOCK,
    RUNGS,
    make_group_spec,
    make_request,
    make_scheduler,
    make_space,
    make_spec,
    run,
    shape,
)  # fmt: skip

WIDE = RungSize("dense16", 24, 16.0), RungSize("int8", 12, 8.0)
FULL = make_group_spec(WIDE, floors=(0, 1, 1))
SMALL = 4  # tokens of a block
VISIBLE = 1, 2, 3, 4, 5, 7, 8, 9, 17


def window_of(visible: int, *, sink: int = 0, recent: int = 0, block_tokens: int = SMALL) -> GroupSpec:
    return make_group_spec(
        RUNGS[:2], visible=visible, sink=sink, sink_nbytes=1, recent=recent, block_tokens=block_tokens
    )


def tables_of(num_blocks: float, *more: GroupSpec, slab_blocks: float = 2, **options) -> BlockTables:
    return make_space(num_blocks, make_spec(RUNGS, more_groups=more, **options), slab_blocks=slab_blocks).tables


def seen(visible: int, position: int) -> range:
    """The positions that a token sees."""
    return range(max(0, position - visible + 1), position + 1)


@pytest.mark.parametrize("visible", VISIBLE)
def test_blocks_pass_when_no_later_token_sees_them(visible: int):
    for sink in (0, 1, 4, 6):
        group = window_of(visible, sink=sink)
        for num_computed in range(80):
            later = {p for position in range(num_computed, num_computed + 40) for p in seen(visible, position)}
            ends = [sink + (i + 1) * SMALL for i in range(30)]
            passed = [all(p not in later for p in range(end - SMALL, end)) for end in ends]
            assert group.num_passed(num_computed) == passed.index(False)
            assert group.sees_sink(num_computed) == any(p < sink for p in later)
            assert group.first_visible(num_computed) == min(later)


@pytest.mark.parametrize("visible", VISIBLE)
def test_a_window_is_counted_with_the_most_that_it_holds_when_a_block_begins(visible: int):
    """Reckoned with each block where it stands when all that may step down has."""
    for sink, recent in product((0, 1, 4, 6), (0, 1, 3, 4, 5, 12)):
        group, most = window_of(visible, sink=sink, recent=recent), (0, 0)
        assert group.split(sink, 1) == (0, 0)
        for begins in range(sink, sink + 90, SMALL):
            blocks = range(group.num_passed(begins), group.blocks_for(begins + 1))
            narrow = sum(sink + (block + 1) * SMALL <= begins - recent for block in blocks)
            most = max(most[0], len(blocks) - narrow), max(most[1], narrow)
            for num_tokens in range(begins + 1, begins + SMALL + 1):
                assert group.split(num_tokens, 1) == most and group.split(num_tokens, 0) == (len(blocks), 0)
            assert sum(most) == len(blocks) <= group.most_visible <= visible // SMALL + 2


def test_a_window_drops_its_blocks_and_their_bytes_at_once():
    window = make_group_spec(RUNGS[:1], floors=(0, 0, 0), visible=BLOCK + 1)
    tables = tables_of(20, window)
    tables.open("a", 2)
    assert tables.reserve("a", 4 * BLOCK)
    full, own = tables.of("a")
    assert [block.group for block in tables.blocks("a")] == [0] * 4 + [1] * 4
    assert [block.number for block in own.blocks] == [block.number for block in full.blocks] == [0, 1, 2, 3]
    assert tables.next_passed_at("a") == 2 * BLOCK
    assert tables.trim("a", 2 * BLOCK - 1) == 2 * BLOCK and own.first == 0
    used = tables.arena.used_nbytes
    assert tables.trim("a", 2 * BLOCK) == 3 * BLOCK and tables.arena.used_nbytes == used - 16
    assert (own.first, len(own.blocks), full.first, len(full.blocks)) == (1, 3, 0, 4)
    assert tables.trim("a", 4 * BLOCK - 1) == 4 * BLOCK and (own.first, len(own.blocks)) == (2, 2)
    assert tables.held("a") == 4 * BLOCK == tables.groups[1].held("a")
    assert tables.reserve("a", 5 * BLOCK) and [block.number for block in own.blocks] == [2, 3, 1]
    tables.check_integrity()
    tables.release("a")
    assert tables.arena.used_nbytes == 0 and not len(tables)


def test_a_sink_out_of_sight_is_given_back_and_not_taken_again():
    window = make_group_spec(RUNGS[:1], floors=(0, 0, 0), visible=8, sink=32, sink_nbytes=4)
    tables = tables_of(20, window, sink=32, sink_nbytes=4)
    tables.open("a", 2)
    assert tables.reserve("a", 32) and tables.next_passed_at("a") == 39
    full, own = tables.of("a")
    assert len(own.slots) == len(full.slots) == 1
    assert tables.trim("a", 38) == 39 and own.slots
    assert tables.trim("a", 39) == 32 + BLOCK + 7 and not own.slots and own.num_slots == 1
    assert tables.reserve("a", 60) and not own.slots and tables.held("a") == 32 + BLOCK
    assert [len(group.entries(group["a"])) for group in tables.groups] == [2, 1]
    assert [group.piece("a", 0) is None for group in tables.groups] == [False, True]
    tables.check_integrity()


def test_a_reservation_is_for_all_groups_or_for_none():
    tables = tables_of(6, make_group_spec(WIDE[:1], floors=(0, 0, 0)), slab_blocks=3)
    assert tables.spec.main is tables.spec.groups[0]
    room = tables.arena.nbytes - tables.arena.reserve_nbytes
    assert (tables.arena.reserve_nbytes, room) == (48 + 40 + 24, -16)
    tables = tables_of(14, make_group_spec(WIDE[:1], floors=(0, 0, 0)), slab_blocks=3)  # two of 24 in a slab
    assert tables.arena.nbytes - tables.arena.reserve_nbytes == 112
    tables.open("a", 0)
    assert tables.reserve("a", 2 * BLOCK)  # two of 16, and a slab; 32 are left
    assert not tables.reserve("a", 3 * BLOCK) and [len(table.blocks) for table in tables.of("a")] == [2, 2]
    assert tables.room_for("a", 9 * BLOCK) == 2 * BLOCK and tables.room_for("a", BLOCK) == BLOCK
    assert tables.wanted("a", 3 * BLOCK, spare=1) == {16: 2, 24: 2}
    assert not tables.has_blocks(1) and tables.has_blocks(0) and tables.free_blocks() == 0
    tables.release("a")
    assert tables.free_blocks() == 2
    tables.check_integrity()


def test_dense_blocks_of_equal_bytes_lie_side_by_side_in_all_groups():
    tables = tables_of(14, make_group_spec(RUNGS[:1], floors=(0, 0, 0)))
    tables.open("a", 0)
    assert tables.free_blocks() == (tables.arena.nbytes - tables.arena.reserve_nbytes) // 32
    assert tables.reserve("a", 2 * BLOCK)
    assert [block.slot.address for block in tables.blocks("a")] == [208, 192, 176, 160]
    assert tables.demand(2 * BLOCK, 0) == Counter({16: 4})
    tables.check_integrity()


def test_groups_step_down_on_rungs_of_their_own():
    tables = tables_of(40, FULL, slab_blocks=3)
    tables.open("a", 2)
    assert tables.reserve("a", 3 * BLOCK)
    found = list(tables.unsettled("a", 2 * BLOCK))
    assert [(block.group, block.floor, age) for block, age in found] == [
        (0, 2, BLOCK), (0, 2, 0), (0, 2, -BLOCK), (1, 1, BLOCK), (1, 1, 0), (1, 1, -BLOCK),
    ]  # fmt: skip
    first, second = (table.blocks[0] for table in tables.of("a"))
    assert tables.coldest("a", 2 * BLOCK) == (first, BLOCK)
    assert tables.demote([(first, 1)]) == 1 and tables.coldest("a", 2 * BLOCK) == (second, BLOCK)
    assert tables.demote([(second, 1)]) == 1 and second.is_settled and not first.is_settled
    assert (first.slot.nbytes, second.slot.nbytes) == (8, 12)
    assert tables.store.num_demotions == {("dense16", "int8"): 2}
    assert [dict(+group.num_blocks) for group in tables.groups] == [{0: 2, 1: 1}, {0: 2, 1: 1}]
    tables.check_integrity()


def test_a_scheduler_gives_back_before_it_makes_room():
    """A window of a block in memory for three: each new block takes the place of the one that has passed."""
    window = make_group_spec(RUNGS[:1], visible=BLOCK)
    scheduler = make_scheduler(3, KVSpec("tiny", (window,), False, 0), budget=BLOCK)
    scheduler.add(make_request("a", 6 * BLOCK, 2 * BLOCK, floor=0))
    steps = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        steps += shape(batch)
        table = scheduler.space.tables.main["a"]
        assert len(table.blocks) <= 3 and table.first == window.num_passed(steps[-1][1])
        run(scheduler, batch)
    assert steps[:6] == [("a", i * BLOCK, BLOCK) for i in range(6)] and not scheduler.num_preemptions
    assert scheduler.space.tables.arena.used_nbytes == 0


def test_windows_alone_hold_requests_of_any_length():
    spec = KVSpec("tiny", (make_group_spec(RUNGS[:1], visible=BLOCK),), False, 0)
    tables = make_space(3, spec).tables
    assert tables.max_tokens(0, context=1_000_000) == 1_000_000 and tables.max_tokens(0, 0.5, context=999) == BLOCK
    assert tables.max_requests(10**9, 0) == 1


def test_usage_and_bytes_sum_over_groups():
    space = make_space(40, make_spec(RUNGS, more_groups=(FULL,)), slab_blocks=3)
    request = make_request("a", 2 * BLOCK)
    space.open(request)
    assert space.reserve(request, 2 * BLOCK) and space.nbytes(request) == 2 * (16 + 24)
    space.demote([(space.tables.groups[1]["a"].blocks[0], 1)])
    assert space.usage(request).blocks == {"dense16": 3, "int8": 1} and space.usage(request).lowest_bits == 8.0
    assert space.nbytes(request) == 2 * 16 + 24 + 12


def test_groups_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="window"):
        make_group_spec(RUNGS, visible=8, has_bank=True)
    with pytest.raises(ValueError, match="floors"):
        make_group_spec(RUNGS, floors=(0, 1))
    for other in (make_group_spec(RUNGS, block_tokens=64), make_group_spec(RUNGS, sink=8, sink_nbytes=1)):
        with pytest.raises(ValueError, match="shapes"):
            make_spec(RUNGS, more_groups=(other,))
    with pytest.raises(ValueError, match="3 groups"):
        make_spec(RUNGS, more_groups=(FULL, FULL))
