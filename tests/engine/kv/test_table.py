"""Block tables on tiny arenas: exact addresses, waves, floors; then random histories against a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qkv_engine.kv.arena import ArenaError
from qkv_engine.kv.block import slot_rung
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.spec import KVSpec, RungSize
from qkv_engine.kv.table import BlockTables

from ...scheduler.common import BANK, BLOCK, DENSE, LADDER, RUNGS, make_space, make_spec


def tables_of(num_blocks: int, ladder: KVSpec = LADDER, slab_blocks: int = 1) -> BlockTables:
    return make_space(num_blocks, ladder, slab_blocks=slab_blocks).tables


def grow(tables: BlockTables, name: str, num_tokens: int, floor: int = 2) -> list:
    if name not in tables:
        tables.open(name, min(floor, tables.spec.num_rungs - 1))
    assert tables.reserve(name, num_tokens)
    tables.store.take_fresh()
    return tables.main[name].blocks


WITH_SINK = make_spec(RUNGS, sink=32, recent=100, sink_nbytes=4)


def test_blocks_are_counted_behind_the_sink():
    tables = tables_of(12, WITH_SINK)
    assert [tables.spec.main.blocks_for(n) for n in (0, 1, 32, 33, 160, 161)] == [0, 0, 0, 1, 1, 2]
    assert tables.demand(32 + 5 * BLOCK, 2) == Counter({16: 2, 4: 4})  # two dense, three narrow and the sink
    assert tables.demand(32 + 5 * BLOCK, 0) == Counter({16: 5, 4: 1})
    assert tables.demand(20, 2) == Counter({4: 1, 16: 0})


def test_capacity_counts_blocks_whole_slabs_and_the_reserve():
    tables = tables_of(6, slab_blocks=0.5)  # the reserve is a slab: two blocks of 4, or one of 8
    assert tables.arena.reserve_nbytes == 8
    assert tables.max_tokens(0) == 5 * BLOCK
    assert tables.max_tokens(1) == (1 + 9) * BLOCK
    assert tables.max_tokens(2) == (1 + 2 * 9) * BLOCK
    assert tables.max_tokens(2, 0.5) == (1 + 2 * 3) * BLOCK
    assert tables.max_requests(5 * BLOCK, 2) == 2
    assert tables.max_requests(20 * BLOCK, 2) == 0
    assert tables_of(6, DENSE).max_tokens(0) == 6 * BLOCK


def test_no_request_fits_where_one_is_too_long():
    tables = tables_of(6)
    most = tables.max_tokens(2)
    assert tables.max_requests(most, 2) == 1
    assert tables.max_requests(most + 1, 2) == 0


def test_room_for_several_sizes_leaves_the_reserve_alone():
    arena = tables_of(6).arena
    assert 0 < arena.room(16) < arena.nbytes // 16
    for size in (16, 8, 4):
        room = arena.room(size)
        assert arena.has_room({size: room}) and not arena.has_room({size: room + 1})


def test_the_peak_outlives_the_memory_that_was_given_back():
    tables = tables_of(6, DENSE)
    grow(tables, "a", 3 * BLOCK, floor=0)
    tables.release("a")
    grow(tables, "b", BLOCK, floor=0)
    assert tables.arena.used_nbytes == 16 and tables.arena.peak_nbytes == 48


def test_a_reservation_is_all_or_nothing():
    tables = tables_of(3, DENSE)
    tables.open("a", 0)
    assert not tables.reserve("a", 3 * BLOCK + 1) and not tables.main["a"].blocks
    assert tables.room_for("a", 9 * BLOCK) == 3 * BLOCK
    assert tables.room_for("a", 9 * BLOCK, spare=2) == BLOCK
    assert tables.reserve("a", 2 * BLOCK + 1) and len(tables.main["a"].blocks) == 3
    assert tables.reserve("a", 3 * BLOCK) and not tables.reserve("a", 3 * BLOCK + 1)


def test_a_sink_as_large_as_a_block_is_counted_with_the_blocks():
    ladder = make_spec(DENSE.main.rungs, sink=BLOCK, sink_nbytes=16)
    tables = tables_of(2, ladder)
    tables.open("a", 0)
    assert tables.room_for("a", 9 * BLOCK) == 2 * BLOCK
    assert not tables.reserve("a", 2 * BLOCK + 1) and tables.reserve("a", 2 * BLOCK)


def test_a_demotion_is_one_wave_that_overwrites_nothing_it_reads():
    tables = tables_of(6)
    blocks = grow(tables, "a", 3 * BLOCK)
    assert tables.demote([(blocks[0], 1), (blocks[1], 2)]) == 2
    ((first, second),) = tables.store.waves
    assert (first.src, first.dst, first.old, first.new) == (80, 0, 0, 1)
    assert (second.src, second.dst, second.old, second.new) == (64, 16, 0, 2)
    assert [block.rung for block in blocks] == [1, 2, 0]
    assert tables.arena.used_nbytes == 8 + 4 + 16
    assert tables.store.num_demotions == {("dense16", "int8"): 1, ("dense16", "int4"): 1}
    tables.check_integrity()


def test_a_demotion_without_room_for_a_slab_begins_a_new_wave():
    two = make_spec((RungSize("dense16", 16, 16.0), RungSize("odd", 9, 8.0)))
    tables = tables_of(4, two)
    blocks = grow(tables, "a", 3 * BLOCK)
    assert tables.demote([(block, 1) for block in blocks]) == 3
    # The second block follows the last one's move to the place that the first left.
    steps, copies = (
        [[(m.src, m.dst) for m in w if (m.old != m.new) == k] for w in tables.store.waves] for k in (True, False)
    )
    assert steps == [[(48, 0)], [], [(32, 16)], [(48, 32)]] and copies == [[], [(16, 48)], [], []]
    tables.check_integrity()


def test_free_bytes_are_gathered_for_a_block():
    tables = tables_of(3, DENSE)
    assert not tables.store._evacuate()
    tables = make_space(16, LADDER, slab_blocks=2).tables  # a slab of 32 and what one may leave free in reserve
    blocks = grow(tables, "a", 8 * BLOCK)
    assert tables.demote([(block, 1) for block in blocks]) == 8
    tables.store.waves.clear()
    held = [block.slot.address for block in blocks]
    assert held == [0, 8, 16, 24, 32, 40, 48, 56] and not tables.store.waves
    tables.open("b", 2, blocks[4:6])
    tables.release("a")
    assert [block.slot.address for block in tables.main["b"].blocks] == [32, 40]
    assert tables.store._evacuate()  # to the free place at the beginning
    assert [block.slot.address for block in tables.main["b"].blocks] == [0, 8]
    assert [[(move.src, move.dst) for move in wave] for wave in tables.store.waves] == [[(32, 0), (40, 8)]]
    tables.check_integrity()


def test_a_fresh_slot_that_moves_is_cleared_at_its_new_place():
    tables = make_space(16, DENSE).tables
    for name in "ab":
        grow(tables, name, 2 * BLOCK)
    tables.store.take_fresh()
    tables.open("e", 0)
    assert tables.reserve("e", BLOCK)  # the fifth place from the end
    tables.release("a")
    assert tables.store._evacuate()
    [block] = tables.main["e"].blocks
    assert (
        block.slot.address == 15 * 16 and not tables.store.waves
    )  # nothing is written there yet, so nothing is copied
    assert tables.store.take_fresh() == [block.slot]


def test_ages_count_from_the_recent_window_and_settled_blocks_are_left_out():
    tables = tables_of(12, WITH_SINK)
    blocks = grow(tables, "a", 32 + 4 * BLOCK)
    num_computed = 32 + 3 * BLOCK
    assert list(tables.unsettled("a", num_computed)) == [
        (block, 3 * BLOCK - 100 - (i + 1) * BLOCK) for i, block in enumerate(blocks)
    ]
    assert tables.next_demotable_at("a") == 32 + BLOCK + 100
    tables.demote([(blocks[0], 2)])
    assert [block for block, _ in tables.unsettled("a", num_computed)] == blocks[1:]
    assert tables.main["a"].num_settled == 1
    assert tables.next_demotable_at("a") == 32 + 2 * BLOCK + 100 <= num_computed
    tables.demote([(blocks[1], 2)])
    assert tables.next_demotable_at("a") > num_computed and tables.main["a"].num_settled == 2


def test_the_floor_of_a_shared_block_is_that_of_those_who_hold_it():
    tables = tables_of(8)
    (block,) = grow(tables, "a", BLOCK, floor=2)
    assert not block.is_shared
    tables.open("pinned", 0, [block])
    assert (block.floor, block.refs, block.is_shared) == (0, 2, True)
    assert list(tables.unsettled("a", 4 * BLOCK)) == []
    tables.release("pinned")
    assert (block.floor, block.refs, block.is_shared) == (2, 1, False)
    assert [found for found, _ in tables.unsettled("a", 4 * BLOCK)] == [block]


def test_a_block_dropped_once_too_often_is_refused():
    tables = tables_of(4)
    (block,) = grow(tables, "a", BLOCK)
    tables.release("a")
    with pytest.raises(ArenaError, match="more often"):
        tables.store.drop(block)
    tables.release("a")  # releasing twice is harmless


class TablesMachine(RuleBasedStateMachine):
    """Requests that grow, share through a prefix cache, step down and go, against lists of what each should hold."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((16, 0), (9, 1), (5, 2))
        rungs = [RungSize(f"r{i}", size, 16.0) for size, i in sizes]
        ladder = make_spec(rungs, sink=32, sink_nbytes=4, others=(BANK,))
        space = make_space(20, ladder, slab_blocks=2, prefix=True)
        self.tables: BlockTables = space.tables
        self.prefix: PrefixCache = space.prefix
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.serial = 0

    @rule(family=st.integers(0, 1), floor=st.integers(0, 2))
    def open(self, family: int, floor: int) -> None:
        name = f"r{self.serial}"
        self.serial += 1
        tokens = [family] * (32 + 6 * BLOCK)
        shared = self.prefix.lookup(tokens, "salt", floor, len(tokens) - 1).blocks
        assert all(block.rung <= floor for block in shared)
        self.tables.open(name, floor, shared)
        self.tokens[name] = tokens
        self.computed[name] = 32 + (len(shared) - 1) * BLOCK if shared else 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_tokens=st.integers(1, 300))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        target = min(len(self.tokens[name]), self.computed[name] + num_tokens)
        room = self.tables.room_for(name, target)
        assert self.tables.reserve(name, target) == (room >= target)
        if room >= target:
            assert len(self.tables.main[name].slots) == 2
            self.computed[name] = target
            self.prefix.publish(name, self.tokens[name], "salt", target)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        found = [b for b, age in self.tables.unsettled(name, self.computed[name]) if age >= 0]
        used = self.tables.arena.used_nbytes
        won = sum({0: 7, 1: 4}[block.rung] for block in found)
        assert self.tables.demote([(block, block.rung + 1) for block in found]) == len(found)
        assert self.tables.arena.used_nbytes == used - won

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tables.release(name)
        self.prefix.forget(name)
        del self.tokens[name], self.computed[name]

    @rule(number=st.integers(1, 8))
    def demote_idle(self, number: int) -> None:
        blocks = self.prefix.coldest(number)
        assert len(set(blocks)) == len(blocks) and all(block.refs == 1 and not block.holders for block in blocks)
        places = [(block.rung, self.prefix._of_block[block].since[0]) for block in blocks]
        idle = [block for block in self.prefix._of_block if block.refs == 1 and 0 <= block.rung < 2]
        others = [(b.rung, self.prefix._of_block[b].since[0]) for b in idle]
        assert places == sorted(others)[:number]
        used = self.tables.arena.used_nbytes
        won = sum({0: 7, 1: 4}[block.rung] for block in blocks)
        assert self.tables.demote([(block, block.rung + 1) for block in blocks]) == len(blocks)
        assert self.tables.arena.used_nbytes == used - won

    @rule()
    def evict(self) -> None:
        idle = self.prefix.idle.nbytes
        assert self.prefix.evict() == bool(idle)
        assert (self.prefix.idle.nbytes < idle) or not idle

    @rule()
    def evacuate(self) -> None:
        used = self.tables.arena.used_nbytes
        self.tables.store._evacuate()
        assert self.tables.arena.used_nbytes == used

    @invariant()
    def books_agree(self) -> None:
        self.tables.check_integrity()
        assert set(self.tokens) == set(self.tables.main._tables)
        for name, num_computed in self.computed.items():
            table = self.tables.main[name]
            assert len(table.blocks) >= self.tables.spec.main.blocks_for(num_computed)
            assert all(0 <= block.rung <= table.floor for block in table.blocks)
            assert [slot.rung for slot in table.slots] == [slot_rung(i) for i in range(len(table.slots))]
            assert all(slot.refs == 1 for slot in table.slots[1:])  # it holds no tokens, so it is not shared
        kinds = Counter((0, block.rung) for block in self.prefix._of_block if block.refs == 1)
        assert self.prefix.idle.kinds() == kinds
        assert len(self.prefix._of_block) == len(self.prefix)


TestTablesMachine = TablesMachine.TestCase
TestTablesMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
