"""The host tier: what leaves, what is written ahead, what comes back, and what is given up; exact slots."""

from __future__ import annotations

from collections import Counter

import pytest

from qkv_engine.kv import host_traffic
from qkv_engine.kv.host_tier import HostTier
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.moves import HostCopy, MoveCommand, take_moves
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.kv.spec import KVSpec
from qkv_engine.request import Request

from ...scheduler.common import BLOCK, DENSE, LADDER, make_request, make_space


def make_hosted(num_blocks: float, host_blocks: float, spec: KVSpec = DENSE) -> tuple[KVManager, HostTier]:
    """KV memory, and host memory of so many widest blocks."""
    tables = make_space(num_blocks, spec).tables
    tier = HostTier(spec, round(16 * host_blocks), tables.arena.slab_nbytes)
    return KVManager(tables, PrefixCache(tables, "model", tier)), tier


def ended(space: KVManager, name: str, salt: int, num_blocks: int = 3, tenant: str = "") -> None:
    """Has a request of so many blocks compute its tokens and end."""
    request = make_request(name, [salt] * num_blocks * BLOCK, floor=space.num_rungs - 1, tenant=tenant)
    request.num_computed_tokens = space.open(request)
    assert space.reserve(request, num_blocks * BLOCK)
    space.computed(request, num_blocks * BLOCK)
    space.release(request)


def carry_out(space: KVManager) -> MoveCommand:
    """Takes what is noted, as if it ended well; then the next step begins."""
    command, _ = take_moves(space.tables)
    space.confirm(space.num_commands)
    space.begin_step(None)
    return command


def waiting(salt: int, num_blocks: int = 3) -> Request:
    return make_request("w", [salt] * num_blocks * BLOCK + [9], floor=0)


def test_what_is_given_up_leaves_a_copy_before_its_slot_is_free():
    space, tier = make_hosted(4, 8)
    ended(space, "a", 1)
    address = space.prefix.lookup([1] * 400, "", 0, 3 * BLOCK).blocks[2].slot.address
    take_moves(space.tables)
    assert space.evict() and space.has_copies
    command = carry_out(space)
    assert [list(wave.outs) for wave in command.waves] == [[HostCopy(address, 128 - 16, 16)]]
    assert tier.stats()[:7] == (128, 16, 1, 16, 0, 0, 0)


def test_a_block_that_was_written_ahead_leaves_for_nothing():
    space, tier = make_hosted(4, 8)
    ended(space, "a", 1)
    space.begin_step(2 * 16)
    space.write_ahead()
    assert len(carry_out(space).written) == 2  # those given up first go first
    assert space.evict() and space.evict() and not space.has_copies
    assert space.evict() and space.has_copies
    carry_out(space)
    stats = tier.stats()
    assert (stats.written_nbytes, stats.out_nbytes, stats.num_blocks) == (32, 16, 3)


def test_while_nothing_runs_blocks_are_written_a_turn_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_traffic, "IDLE_NBYTES", 2 * 16)
    space, tier = make_hosted(8, 8)
    assert not space.has_unwritten
    ended(space, "a", 1, num_blocks=5)
    written = list[int]()
    while space.has_unwritten:
        space.begin_step(None)
        space.write_ahead()
        written.append(len(carry_out(space).written))
    assert written == [2, 2, 1] and tier.stats().written_nbytes == 5 * 16
    ended(space, "b", 2, num_blocks=1)
    assert space.has_unwritten and not make_space(8, DENSE).has_unwritten


def test_while_nothing_runs_pieces_are_fetched_a_turn_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_traffic, "TURN_NBYTES", 2 * 16)
    space, _ = make_hosted(6, 8)
    ended(space, "a", 1)
    while space.evict():
        pass
    carry_out(space)
    request, numbers = waiting(1), list[int]()
    while (fetching := space.begin_fetching(request)) is not None:
        while fetching.has_next:
            assert fetching.fetch()
        fetching.end()
        numbers.append(len(carry_out(space).fetched))
    assert numbers == [2, 1] and space.open(request) == 3 * BLOCK


def test_only_blocks_that_can_step_down_no_more_are_written_ahead():
    space, tier = make_hosted(12, 8, LADDER)
    ended(space, "a", 1)
    space.write_ahead()
    assert not space.has_copies
    for rung in (1, 2):
        space.demote([(block, rung) for block in space.idle(2)])
    space.write_ahead()
    assert sorted(copy.nbytes for copy in carry_out(space).written) == [4, 4]
    assert tier.stats().num_blocks == 2


def test_a_waiting_request_gets_what_it_lacks_in_order_and_starts_on_it():
    space, tier = make_hosted(6, 8)
    ended(space, "a", 1)
    while space.evict():
        pass
    request = waiting(1)
    assert space.begin_fetching(request) is None  # its bytes are under way
    carry_out(space)
    fetching = space.begin_fetching(request)
    assert fetching is not None and fetching.has_next and fetching.has_room(0)
    while fetching.has_next:
        assert fetching.fetch()
    fetching.end()
    assert fetching.is_under_way and space.begin_fetching(request).is_under_way
    command = carry_out(space)
    assert len(command.fetched) == 3 and not command.fresh, "what is filled is cleared before"
    assert space.begin_fetching(request) is None and space.open(request) == 3 * BLOCK
    assert tier.stats().fetched_tokens == {"dense16": 3 * BLOCK}
    space.tables.check_integrity()


def test_the_end_of_a_prefix_is_given_up_before_its_beginning():
    space, tier = make_hosted(8, 3)
    ended(space, "a", 1)
    while space.evict():
        pass
    carry_out(space)
    ended(space, "b", 2, num_blocks=1)
    assert space.evict()
    carry_out(space)
    request = waiting(1)
    fetching = space.begin_fetching(request)
    assert fetching is not None and len(fetching._missing) == 2 and tier.stats().dropped_nbytes == 16
    fetching.end()


def test_values_found_bad_are_taken_out_after_their_block_has_gone():
    space, tier = make_hosted(4, 8)
    ended(space, "a", 1)
    block = space.prefix.lookup([1] * 400, "", 0, 3 * BLOCK).blocks[2]
    assert space.evict()
    take_moves(space.tables)
    space.distrust({block})
    assert tier.stats().num_blocks == 0 and tier.stats().used_nbytes == 16  # its bytes are under way
    space.begin_step(None)
    assert tier.stats().used_nbytes == 0


def test_a_block_that_goes_before_it_is_written_ahead_is_copied_at_once():
    space, tier = make_hosted(4, 8)
    ended(space, "a", 1, num_blocks=1)
    space.write_ahead()
    assert space.evict()
    command = carry_out(space)
    assert not command.written and [len(wave.outs) for wave in command.waves] == [1]
    assert tier.stats().num_blocks == 1
    space.prefix.clear()
    space.begin_step(None)
    assert tier.stats().used_nbytes == 0


def test_a_narrow_piece_of_the_disk_takes_the_place_of_no_wide_copy_that_came_meanwhile():
    space, tier = make_hosted(12, 8, LADDER)
    ended(space, "a", 1)
    block = space.idle(1)[0]
    entry = space.prefix.entry_of(block)
    coming = tier.receive(entry.key, entry.parent, entry.tokens, {0: 1})
    assert tier.write(entry.key, entry.parent, entry.tokens, block) == 16
    used = tier.arena.used_nbytes
    assert tier.land(coming, True) and tier.arena.used_nbytes == used - 8
    assert [copy.rung for copy in tier.piece(entry.key).held()] == [0]


def test_tenants_over_their_share_give_up_their_own_pieces_first():
    space, tier = make_hosted(30, 6, LADDER)
    tier.divide(0.4)
    for name, tenant, number in (("a", "few", 2), ("b", "many", 7)):
        ended(space, name, ord(name), number, tenant)
    for entry in sorted(space.prefix._entries.values(), key=lambda entry: entry.tenant):
        tier.write(entry.key, entry.parent, entry.tokens, entry.blocks[0], entry.tenant)
        take_moves(space.tables)
        space.begin_step(None)
    tenants = Counter(piece.tenant for piece in tier._pieces.values())
    assert tenants == {"few": 2, "many": 4}, "the older ones would have gone"
    assert tier.shares._nbytes == {"few": 2 * 16, "many": 4 * 16} and list(tier.shares.over) == ["many"]


def test_a_block_that_steps_down_before_it_is_written_ahead_leaves_as_it_is_then():
    """The copy that was noted had the bytes of another rung."""
    space, tier = make_hosted(12, 8, LADDER)
    ended(space, "a", 1)
    block = space.idle(1)[0]
    entry = space.prefix.entry_of(block)
    assert tier.write(entry.key, entry.parent, entry.tokens, block) == 16
    space.demote([(block, 1)])
    while space.evict():
        pass
    copies = [copy for outs in take_moves(space.tables)[0].waves for copy in outs.outs]
    assert sorted(copy.nbytes for copy in copies) == [8, 16, 16]
    assert [copy.rung for copy in tier.piece(entry.key).held()] == [1]


def test_an_earlier_copy_goes_with_a_block_that_turns_out_bad_as_it_is_given_up():
    space, tier = make_hosted(12, 8, LADDER)
    ended(space, "a", 1)
    blocks = space.idle(3)
    space.prefix.host.park(blocks)
    carry_out(space)
    space.demote([(block, 1) for block in blocks])
    while space.evict():
        pass
    assert tier.stats().num_blocks == 3 and not space.has_copies
    take_moves(space.tables)
    space.distrust(blocks[:1])
    assert tier.stats().num_blocks == 2
    space.confirm(space.num_commands)
    space.distrust(blocks[1:])  # a later command can tell nothing of them
    assert tier.stats().num_blocks == 2


def test_who_is_parked_leaves_the_beginning_where_room_lacks():
    space, tier = make_hosted(6, 3)
    ended(space, "a", 1, 5)
    blocks = space.prefix.lookup([1] * 800, "", 0, 5 * BLOCK).blocks
    assert space.prefix.host.park(blocks[:1]) == BLOCK and len(carry_out(space).waves[0].outs) == 1
    # The last blocks would take the place of the first one, without which they are of no use.
    assert space.prefix.host.park(blocks) == 3 * BLOCK
    assert [list(wave.outs) for wave in carry_out(space).waves] == [
        [HostCopy(block.slot.address, address, 16) for block, address in zip(blocks[1:3], (16, 0), strict=True)]
    ]
    keys = [space.prefix.entry_of(block).key for block in blocks]
    assert [tier.keeps(key, 0, 0) for key in keys] == [True, True, True, False, False]


def test_what_steps_down_before_it_is_written_leaves_as_it_is_now():
    space, tier = make_hosted(12, 8, LADDER)
    ended(space, "a", 1, 1)
    (block,) = space.idle(1)
    entry = space.prefix.entry_of(block)
    assert tier.write(entry.key, entry.parent, entry.tokens, block) == 16
    space.demote([(block, 1)])
    assert space.evict()
    command = carry_out(space)
    assert not command.written and [copy.nbytes for wave in command.waves for copy in wave.outs] == [8]
    assert [copy.rung for copy in tier.piece(entry.key).held()] == [1] and tier.arena.used_nbytes == 8
