"""A slot of a request that holds no tokens, beside a sink or alone: taken once, never shared, moved, given back."""

from __future__ import annotations

from collections import Counter

import pytest

from qkv_engine.kv.block import slot_rung
from qkv_engine.kv.spec import KVSpec
from qkv_engine.request import KVUsage

from ...scheduler.common import BANK, BLOCK, RUNGS, make_request, make_space, make_spec
from .copies import Copy

ALONE = make_spec(RUNGS, others=(BANK,))
BESIDE = make_spec(RUNGS, sink=32, sink_nbytes=4, others=(BANK,))
each_ladder = pytest.mark.parametrize("ladder", (ALONE, BESIDE), ids=("alone", "beside a sink"))


@each_ladder
def test_it_is_taken_with_the_first_block_and_given_back_with_the_last(ladder: KVSpec):
    tables = make_space(12, ladder).tables
    tables.open("a", 2)
    assert tables.held("a") == 0 and not tables.main["a"].slots
    for num_tokens in (1, 20, 2 * BLOCK, 2 * BLOCK + 40):
        assert tables.reserve("a", num_tokens)
        assert [slot.rung for slot in tables.main["a"].slots] == [slot_rung(i) for i in range(len(ladder.main.slots))]
        assert tables.arena.live[BANK.nbytes] == 1
    assert tables.held("a") == ladder.main.sink + len(tables.main["a"].blocks) * BLOCK
    assert list(tables.main["a"]) == [*tables.main["a"].slots, *tables.main["a"].blocks]
    assert all(block.rung >= 0 for block, _ in tables.unsettled("a", 10 * BLOCK))
    tables.release("a")
    assert tables.arena.used_nbytes == 0 and not +tables.main.num_blocks
    tables.check_integrity()


@each_ladder
def test_every_request_is_counted_with_its_own(ladder: KVSpec):
    space = make_space(12, ladder)
    sizes = Counter(slot.nbytes for slot in ladder.main.slots)
    assert space.tables.demand(ladder.main.sink + 2 * BLOCK, 0) == sizes + Counter({16: 2})
    requests = [make_request(name, ladder.main.sink + BLOCK, max_tokens=1) for name in "abc"]
    for number, request in enumerate(requests, 1):
        space.open(request)
        assert space.demand.total.slots(2)[BANK.nbytes] == number
    tables = make_space(4 + 2, ladder).tables
    most = tables.max_requests(ladder.main.sink + 1, 0)
    assert most == (3 if not ladder.main.sink else 2)  # a slab each for 5 banks, perhaps 4 sinks, and the dense blocks
    for name in range(most):
        tables.open(str(name), 2)
        assert tables.reserve(str(name), ladder.main.sink + 1)
    tables.open("more", 2)
    assert tables.room_for("more", ladder.main.sink + 1) == ladder.main.sink and not tables.reserve(
        "more", ladder.main.sink + 1
    )


@each_ladder
def test_who_shares_a_prefix_has_a_slot_of_its_own(ladder: KVSpec):
    space, tokens = make_space(16, ladder, prefix=True), [1] * (ladder.main.sink + 2 * BLOCK + 1)
    for name in "ab":
        request = make_request(name, tokens)
        found = space.open(request)
        assert found == (ladder.main.sink + 2 * BLOCK if name == "b" else 0)
        assert not any(slot.rung == slot_rung(len(ladder.main.slots) - 1) for slot in space.tables.main[name].slots)
        assert space.reserve(request, len(tokens))
        space.computed(request, len(tokens))
    a, b = space.tables.main["a"], space.tables.main["b"]
    assert a.slots[-1] is not b.slots[-1] and a.slots[:-1] == b.slots[:-1] and a.blocks[:2] == b.blocks[:2]
    assert [a.slots[-1].refs, b.slots[-1].refs] == [1, 1]
    for name in "ab":
        space.tables.release(name)
    assert space.prefix is not None and space.tables.arena.live[BANK.nbytes] == 0
    assert len(space.prefix) == 2 + bool(ladder.main.sink)
    space.tables.check_integrity()


def test_without_room_for_it_a_hit_gets_no_tokens():
    space = make_space(5, ALONE, prefix=True)  # three slabs of one block, or of five banks
    first = make_request("a", [1] * (BLOCK + 1))
    space.open(first)
    assert space.reserve(first, BLOCK)
    space.computed(first, BLOCK)
    for name in "bcde":
        space.tables.open(name, 2)
        assert space.tables.reserve(name, 0)
    second = make_request("f", [1] * (BLOCK + 1))
    assert space.open(second) == BLOCK
    slot = space.tables.arena.allocate(16)  # the third slab
    assert slot is not None and space.room_for(second, BLOCK + 1) == 0 == space.room_for(second, BLOCK)
    assert not space.reserve(second, BLOCK)
    space.tables.release("b")
    assert space.room_for(second, BLOCK + 1) == BLOCK and space.reserve(second, BLOCK)


@each_ladder
def test_it_moves_when_its_slab_is_emptied(ladder: KVSpec):
    tables = make_space(12, ladder).tables
    for name in "abcdef":  # five banks a slab of 16 bytes
        tables.open(name, 2)
        assert tables.reserve(name, ladder.main.sink)
    tables.store.take_fresh()
    bank = tables.main["f"].slots[-1]
    old = bank.slot.address
    tables.release("a")
    while tables.store._evacuate():
        pass
    moves = [move for wave in tables.store.waves for move in wave if move.block is bank]
    assert [(move.src, move.dst) for move in moves] == [(old, bank.slot.address)] and bank.slot.address < old
    assert {(move.old, move.new) for move in moves} == {(bank.rung, bank.rung)}
    tables.check_integrity()


def test_the_device_has_entries_for_what_holds_tokens():
    for ladder in (ALONE, BESIDE):
        tables = make_space(12, ladder).tables
        copy = Copy(tables, 2, 4 * BLOCK)
        tables.open("a", 2)
        for blocks in (1, 3):
            assert tables.reserve("a", ladder.main.sink + blocks * BLOCK)
            (row,) = copy.follow(tables, ["a"])
            entries = [*tables.main["a"].slots[:-1], *tables.main["a"].blocks]
            assert copy.num_blocks[0][0] == len(entries) == copy.rows._rows["a"].num_entries[0]
            assert copy.groups[0].entries([row], len(entries))[0].tolist() == [
                [block.slot.address for block in entries]
            ]


def test_a_request_without_blocks_has_used_no_bits():
    space, request = make_space(12, ALONE), make_request("a", [1])
    space.open(request)
    assert space.reserve(request, 1) and space.usage(request) == KVUsage({}, None)
