"""Cached blocks that no request holds: how they step down, are found narrow, replaced and given up; exact bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from qkv_engine.kv.block import Block
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.shortage import Shortage
from qkv_engine.request import Request

from ...scheduler.common import BLOCK, DENSE, LADDER, RUNGS, make_group_spec, make_request, make_space, make_spec

SINK = make_spec(RUNGS, sink=32, sink_nbytes=4)


def ids(salt: int, num_blocks: float) -> list[int]:
    return [salt] * int(num_blocks * BLOCK)


def begun(space: KVManager, name: str, tokens: list[int], floor: int = 2) -> Request:
    """A request that computed all its tokens."""
    request = make_request(name, tokens, floor=floor)
    request.num_computed_tokens = space.open(request)
    assert space.reserve(request, len(tokens))
    request.num_computed_tokens = len(tokens)
    space.computed(request, len(tokens))
    return request


def rungs(space: KVManager, *salts: int, num_blocks: int = 3) -> list[list[int]]:
    """The rungs of the cached blocks of these prompts."""
    hits = [space.prefix.lookup(ids(salt, num_blocks + 1), "", 2, num_blocks * BLOCK) for salt in salts]
    return [[block.rung for block in hit.blocks] for hit in hits]


def step_down(space: KVManager, number: int) -> list[Block]:
    blocks = space.idle(number)
    assert space.demote([(block, block.rung + 1) for block in blocks]) == len(blocks)
    return blocks


def test_idle_blocks_step_down_the_widest_first_and_of_these_the_least_recently_used():
    space = make_space(20, LADDER, prefix=True)
    for salt in (1, 2):
        space.release(begun(space, f"r{salt}", ids(salt, 3)))
    assert space.prefix.idle.nbytes == 6 * 16
    step_down(space, 2)  # the end of a prefix goes before its beginning
    assert rungs(space, 1, 2) == [[0, 1, 1], [0, 0, 0]] and space.prefix.idle.nbytes == 4 * 16 + 2 * 8
    step_down(space, 2)
    assert rungs(space, 1, 2) == [[1, 1, 1], [0, 0, 1]]
    step_down(space, 4)
    assert rungs(space, 1, 2) == [[1, 2, 2], [1, 1, 1]]
    while space.idle(1):
        step_down(space, 1)
    assert rungs(space, 1, 2) == [[2] * 3, [2] * 3] and space.prefix.idle.nbytes == 6 * 4
    steps = space.tables.store.num_idle_demotions
    assert steps == {("dense16", "int8"): 6, ("int8", "int4"): 6} and not space.tables.store.num_demotions
    space.tables.check_integrity()


def test_a_block_in_use_is_not_idle_and_is_young_when_it_is_let_go():
    space = make_space(20, LADDER, prefix=True)
    for salt in (1, 2):
        space.release(begun(space, f"r{salt}", ids(salt, 2)))
    again = begun(space, "again", ids(1, 2.5))
    assert {id(block) for block in space.idle(9)} == {id(e.blocks[0]) for e in list(space.prefix._entries.values())[2:]}
    space.release(again)
    step_down(space, 2)
    assert rungs(space, 1, 2, num_blocks=2) == [[0, 0], [1, 1]]


def test_a_dense_ladder_and_a_sink_have_no_step_to_take():
    space = make_space(20, DENSE, prefix=True)
    space.release(begun(space, "a", ids(1, 2), floor=0))
    assert space.idle(9) == [] and space.idle_kinds() == {(0, 0): 2}
    space = make_space(20, SINK, prefix=True)
    space.release(begun(space, "a", [1] * (32 + BLOCK)))
    assert len(space.idle(9)) == 1 and space.idle_kinds() == {(0, 0): 1, (0, -1): 1}


def test_a_hit_runs_on_blocks_as_they_are_and_tells_their_rungs():
    space = make_space(20, SINK, prefix=True)
    space.release(begun(space, "a", [1] * (32 + 3 * BLOCK)))
    first, second = step_down(space, 2)
    step_down(space, 1)  # a dense one
    space.demote([(first, 2)])
    request = make_request("b", [1] * (33 + 3 * BLOCK), floor=2)
    assert space.open(request) == 32 + 3 * BLOCK and list(space.blocks(request))[3] is first
    assert request.found_tokens == {"dense16": 32, "int8": 2 * BLOCK, "int4": BLOCK} == space.prefix.hit_tokens
    space.demote([(second, 2)])
    assert request.found_tokens["int8"] == 2 * BLOCK  # what they were


def test_a_wider_floor_recomputes_from_the_first_narrow_block_and_its_blocks_are_filed_once():
    space = make_space(20, LADDER, prefix=True)
    space.release(begun(space, "a", ids(1, 4)))
    entries = list(space.prefix._entries.values())
    a = [entry.blocks[0] for entry in entries]
    space.demote([(a[1], 2), (a[3], 1)])
    used = space.tables.arena.used_nbytes
    pinned = begun(space, "pinned", ids(1, 4.5), floor=0)
    assert pinned.found_tokens == {"dense16": BLOCK}
    own = space.tables.main["pinned"].blocks
    assert [entry.blocks[0] for entry in entries] == own[:4] == [a[0], *own[1:4]]
    assert space.tables.arena.used_nbytes == used - 4 - 8 + 3 * 16  # a third dense one, and the open one
    assert [block.refs for block in own] == [2] * 4 + [1] and [block.refs for block in a] == [2, 0, 0, 0]
    space.computed(pinned, len(pinned.token_ids))
    assert [block.refs for block in own] == [2] * 4 + [1]
    space.release(pinned)
    assert space.prefix.idle.nbytes == 4 * 16 and len(space.prefix._of_block) == 4
    space.tables.check_integrity()
    space.prefix.clear()
    assert space.tables.arena.used_nbytes == 0


def test_a_narrow_block_in_use_stays_with_its_holder_when_a_wider_one_is_filed():
    space = make_space(20, LADDER, prefix=True)
    holder = begun(space, "a", ids(1, 2.5))
    (narrow, wide, _) = space.tables.main["a"].blocks
    space.demote([(narrow, 1)])
    pinned = begun(space, "pinned", ids(1, 2.5), floor=0)
    own = space.tables.main["pinned"].blocks
    assert (narrow.refs, wide.refs) == (1, 2) and [block.refs for block in own] == [2, 1, 1]
    space.release(holder)
    space.release(pinned)
    assert rungs(space, 1, num_blocks=2) == [[0, 0]] and space.tables.arena.used_nbytes == 2 * 16
    space.tables.check_integrity()


def test_a_narrow_block_takes_the_place_of_no_wide_one():
    space = make_space(20, LADDER, prefix=True)
    space.tables.open("b", 2)
    assert space.tables.reserve("b", BLOCK)
    space.release(begun(space, "a", ids(1, 1)))
    (entry,) = space.prefix._entries.values()
    wide, narrow = entry.blocks[0], space.tables.main["b"].blocks[0]
    space.tables.demote([(narrow, 1)])
    space.prefix.publish("b", ids(1, 1), "", BLOCK)
    assert entry.blocks[0] is wide and narrow.refs == 1


def test_groups_that_see_all_step_down_one_by_one_and_are_given_up_together():
    spec = make_spec(RUNGS[:2], more_groups=(make_group_spec(RUNGS[:2]),))
    space = make_space(40, spec, prefix=True)
    space.release(begun(space, "a", ids(1, 2), floor=1))
    assert [(block.group, block.rung) for block in step_down(space, 3)] == [(0, 1), (0, 1), (1, 1)]
    assert space.idle_kinds() == {(0, 1): 2, (1, 1): 1, (1, 0): 1}
    held = space.prefix._entries[next(iter(space.prefix._entries))].blocks[1]
    space.tables.store.share(held)  # as if a request held it
    assert space.idle_kinds() == {(0, 1): 2, (1, 1): 1}  # its companion can go alone
    space.tables.store.drop(held)
    assert space.idle_kinds() == {(0, 1): 2, (1, 1): 1, (1, 0): 1}
    assert space.evict() and space.tables.arena.used_nbytes == 8 + 16


def test_a_block_goes_alone_while_its_neighbour_in_another_group_is_in_use():
    space = make_space(40, make_spec(RUNGS[:1], more_groups=(make_group_spec(RUNGS[:1]),)), prefix=True)
    space.release(begun(space, "a", ids(1, 2), floor=0))
    first, last = space.prefix._entries.values()
    held = first.blocks[0]
    space.tables.store.share(held)  # as if a request held it
    assert space.evict() and last.key not in space.prefix._entries and space.tables.arena.used_nbytes == 2 * 16
    assert space.evict() and first.blocks == [held, None] and space.tables.arena.used_nbytes == 16
    assert not space.evict() and not space.idle_kinds()
    space.tables.store.drop(held)
    assert space.idle_kinds() == {(0, 0): 1}
    assert space.evict() and not len(space.prefix) and not space.tables.arena.used_nbytes
    space.tables.check_integrity()


def num_lines(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs."""
    number = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal number
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return number


def test_what_can_be_given_up_is_known_without_a_look_at_each_block():
    lines = []
    for number in (4, 400):
        space = make_space(2 * number, LADDER, prefix=True)
        space.release(begun(space, "a", ids(1, number)))
        assert space.idle_kinds() == {(0, 0): number}
        lines.append(num_lines(space.idle_kinds))
    assert lines[0] == lines[1] > 0


def test_tenants_over_their_share_step_down_and_give_up_their_own_first():
    space = make_space(20, LADDER, prefix=True, quota=0.25)
    for salt, (tenant, number) in enumerate((("few", 4), ("many", 6)), 1):
        request = make_request(tenant, ids(salt, number), floor=2, tenant=tenant)
        request.num_computed_tokens = space.open(request)
        assert space.reserve(request, number * BLOCK)
        space.computed(request, number * BLOCK)
        space.release(request)
    step_down(space, 1)
    assert rungs(space, 1, num_blocks=4) == [[0] * 4], "the least recently used, but within its share"
    step_down(space, 2)  # then nobody is over 80 bytes
    assert rungs(space, 2, num_blocks=6) == [[0, 0, 0, 1, 1, 1]]
    step_down(space, 1)
    assert rungs(space, 1, num_blocks=4) == [[0, 0, 0, 1]]
    space.tables.arena.resize(8 * 16)  # a share of 32 bytes: both are over
    assert space.evict() and rungs(space, 1, num_blocks=4) == [[0, 0, 0]]


def test_what_is_given_up_counts_as_room():
    space = make_space(6, LADDER, prefix=True)
    space.release(begun(space, "a", ids(1, 3)))
    shortage = Shortage(space.tables, {16: 3})
    assert not shortage.without(0, 0, 1) and shortage.without(0, 0, 2)


def test_blocks_that_fall_idle_without_end_leave_nothing_behind():
    space = make_space(20, LADDER, prefix=True)
    for serial in range(300):
        space.release(begun(space, f"r{serial}", ids(1, 3)))
    idle = space.prefix.idle
    assert len(idle._steps) < 100 and len(idle._exits) < 100
    assert len(step_down(space, 9)) == 3 == len(step_down(space, 9)) and space.idle(9) == []
    assert [space.evict() for _ in range(4)] == [True, True, True, False]
    assert not idle._exits and space.tables.arena.used_nbytes == 0


def test_a_block_that_others_follow_is_given_up_last_however_old():
    space = make_space(12, LADDER, prefix=True)
    first, second = (make_request(name, ids(1, 2), floor=2) for name in "ab")
    for request in (first, second):  # computed beside each other
        space.open(request)
        assert space.reserve(request, 2 * BLOCK)
    space.prefix.publish("a", first.token_ids, "", BLOCK)
    space.prefix.publish("b", second.token_ids, "", 2 * BLOCK)  # its second block follows the first one's first
    space.release(first)
    space.release(second)
    [parent, child] = space.prefix._entries.values()
    assert parent.since[0] < child.since[0]
    assert space.evict() and list(space.prefix._entries.values()) == [parent] and space.evict() and not space.evict()
