"""The arena's books: exact addresses on tiny arenas, then random histories checked after every event."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qkv_engine.kv.arena import Arena, ArenaError, Slot


def test_slots_come_in_address_order_and_slabs_fill_before_the_next_is_opened():
    arena = Arena(4 * 64, 64)
    assert [arena.allocate(32).address for _ in range(5)] == [0, 32, 64, 96, 128]
    assert arena.used_nbytes == 160 and arena.room(32) == 3


def test_the_fullest_slab_is_filled_first():
    arena = Arena(2 * 128, 128)
    slots = [arena.allocate(32) for _ in range(8)]
    for slot in (slots[0], slots[1], slots[5]):  # slab 0 keeps two slots, slab 1 three
        arena.release(slot)
    assert [arena.allocate(32).address for _ in range(3)] == [160, 0, 32]


def test_an_empty_slab_serves_another_size():
    arena = Arena(64, 64)
    small = [arena.allocate(16) for _ in range(4)]
    assert arena.allocate(64) is None
    for slot in small:
        arena.release(slot)
    assert arena.allocate(64).address == 0
    arena.check_integrity()


def test_a_size_that_does_not_divide_the_slab_wastes_only_the_rest():
    arena = Arena(2 * 100, 100)
    assert arena.room(30) == 6
    addresses = [arena.allocate(30).address for _ in range(6)]
    assert addresses == [0, 30, 60, 100, 130, 160]
    assert arena.allocate(30) is None


def test_a_dead_slot_is_refused_even_when_its_address_lives_again():
    arena = Arena(64, 64)
    stale = arena.allocate(64)
    arena.release(stale)
    assert not stale.alive and arena.allocate(64).address == stale.address
    with pytest.raises(ArenaError, match="not alive"):
        arena.release(stale)


def test_the_reserve_is_for_the_urgent():
    arena = Arena(3 * 64, 64, 64)
    assert arena.room(32) == 4
    for _ in range(4):
        assert arena.allocate(32) is not None
    assert arena.allocate(32) is None and arena.allocate(16) is None
    assert arena.allocate(16, urgent=True).address == 128
    assert arena.room(32) == 0


def test_room_counts_what_gathering_free_bytes_would_give():
    arena = Arena(2 * 64, 64)
    slots = [arena.allocate(16) for _ in range(8)]
    for slot in slots[1:4] + slots[5:8]:  # two slabs with one live slot each
        arena.release(slot)
    assert arena.room(64) == 1
    assert arena.allocate(64) is None  # not before a slab is emptied
    for old, _ in arena.evacuate():
        arena.release(old)
    assert arena.allocate(64) is not None and arena.room(64) == 0
    arena.check_integrity()


def test_a_slab_that_does_not_fit_into_its_siblings_is_not_emptied():
    arena = Arena(2 * 48, 48)
    slots = [arena.allocate(16) for _ in range(6)]
    for index in (0, 3):  # two of three in each
        arena.release(slots[index])
    assert arena.evacuate() == []
    arena.check_integrity()


def test_a_slab_that_is_emptied_takes_none_of_its_own_slots_though_it_is_the_fullest():
    arena = Arena(3 * 48, 48)
    first, *slots = arena.allocate(48), *(arena.allocate(16) for _ in range(6))
    for slot in (first, slots[0], slots[1], slots[3]):  # a free place, one of three slots, two of three
        arena.release(slot)
    moves = arena.evacuate()
    assert [(old.address, new.address) for old, new in moves] == [(112, 48), (128, 64)]
    for old, _ in moves:
        arena.release(old)
    arena.check_integrity()


def test_evacuation_empties_the_sparsest_slab_into_its_siblings():
    arena = Arena(2 * 64, 64)
    slots = [arena.allocate(16) for _ in range(8)]
    for slot in slots[0:2] + slots[5:8]:  # slab 0 keeps 32 and 48, slab 1 keeps 64
        arena.release(slot)
    moves = arena.evacuate()
    assert [(old.address, new.address) for old, new in moves] == [(64, 0)]
    for old, _ in moves:
        arena.release(old)
    assert arena.room(64) == 1 and arena.evacuate() == []
    arena.check_integrity()


def test_what_is_out_of_date_about_slabs_is_forgotten():
    arena = Arena(16 * 64, 64)
    slots = [arena.allocate(16) for _ in range(64)]
    for _ in range(1000):
        slot = slots.pop(0)
        arena.release(slot)
        slots.append(arena.allocate(16))
        arena.release(slots.pop(0))
        slots.append(arena.allocate(16))
    assert len(arena._ranked[16]) < 200
    arena.check_integrity()


def test_blocks_lie_side_by_side_at_the_end_and_slabs_at_the_beginning():
    arena = Arena(100, 24, block_nbytes=16)
    assert [arena.allocate(16).address for _ in range(2)] == [84, 68]
    assert [arena.allocate(12).address for _ in range(3)] == [0, 12, 24]
    assert (arena.room(16), arena.room(12), arena.room(24)) == (1, 1, 0)
    assert arena.packed_nbytes({16: 2, 12: 3, 0: 0}) == 2 * 16 + 2 * 24
    assert arena.has_room({16: 1, 12: 1}) and not arena.has_room({16: 2}) and arena.has_room({16: 2, 12: -1})
    arena.check_integrity()


def test_the_lowest_free_place_of_a_block_is_taken_first():
    arena = Arena(6 * 16, 16, block_nbytes=16)
    slots = [arena.allocate(16) for _ in range(5)]
    for index in (3, 1):
        arena.release(slots[index])
    assert [arena.allocate(16).address for _ in range(3)] == [64, 32, 0]
    assert arena.allocate(16) is None and arena.allocate(16, urgent=True) is None
    arena.check_integrity()


def test_the_last_blocks_move_to_free_places_to_make_room_for_a_slab():
    arena = Arena(5 * 16, 24, block_nbytes=16)
    slots = [arena.allocate(16) for _ in range(5)]
    for index in (0, 2):
        arena.release(slots[index])
    assert arena.room(12) == 2 and arena.allocate(12) is None
    moves = arena.evacuate()
    assert [(old.address, new.address) for old, new in moves] == [(0, 64), (16, 32)]
    for old, _ in moves:
        arena.release(old)
    assert arena.allocate(12).address == 0
    arena.check_integrity()


def test_the_last_slabs_are_emptied_to_make_room_for_a_block():
    arena = Arena(4 * 12, 12, block_nbytes=24)
    slots = [arena.allocate(12) for _ in range(2)] + [arena.allocate(6) for _ in range(4)]
    for index in (0, 1, 2):  # two slabs, and one of two slots in the third
        arena.release(slots[index])
    assert arena.room(24) == 1 and arena.allocate(24) is None
    moves = arena.evacuate()
    assert [(old.address, new.address) for old, new in moves] == [(36, 0), (42, 6), (30, 12)]
    for old, _ in moves:
        arena.release(old)
    assert arena.allocate(24).address == 24
    arena.check_integrity()


def test_a_request_for_nothing_has_no_room_while_demotions_hold_the_reserve():
    arena = Arena(3 * 16, 16, 16, block_nbytes=16)
    assert arena.allocate(16) and arena.allocate(8) and arena.allocate(4, urgent=True)
    assert arena.room(8) == arena.room(4) == 0 and arena.allocate(8) is None
    assert not arena.has_room({8: 1}) and not arena.has_room({})


class ArenaMachine(RuleBasedStateMachine):
    """Random allocations, shares and releases against a map from bytes to owners."""

    SIZES = (16, 24, 40, 64, 128)

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(6 * 128 + 10, 70, 70, block_nbytes=128)
        self.live: list[Slot] = []

    @rule(size=st.sampled_from(SIZES))
    def allocate(self, size: int) -> None:
        could = self.arena.room(size)
        slot = self.arena.allocate(size)
        while slot is None and could:
            moves = self.arena.evacuate()
            assert moves, "room was promised that emptying slabs does not give"
            for old, new in moves:
                self.live.remove(old)
                self.live.append(new)
                self.arena.release(old)
            slot = self.arena.allocate(size)
        assert (slot is not None) == (could > 0)
        if slot is not None:
            assert self.arena.room(size) == could - 1
            self.live.append(slot)

    @rule()
    def evacuate(self) -> None:
        used = self.arena.used_nbytes
        for old, new in self.arena.evacuate():
            assert old.nbytes == new.nbytes
            self.live.remove(old)
            self.live.append(new)
            self.arena.release(old)
        assert self.arena.used_nbytes == used

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.arena.release(self.live.pop(index))

    @invariant()
    def the_fullest_slab_is_found(self) -> None:
        slabs = self.arena._slabs
        for size, partial in self.arena._partial.items():
            if partial:
                assert self.arena._fullest(size) == min(partial, key=lambda number: (-len(slabs[number].live), number))

    @invariant()
    def every_byte_has_at_most_one_slot(self) -> None:
        self.arena.check_integrity()
        owner: dict[int, Slot] = {}
        for slot in set(self.live):
            for byte in range(slot.address, slot.address + slot.nbytes):
                assert byte < self.arena.nbytes and byte not in owner
                owner[byte] = slot
        assert len(owner) == self.arena.used_nbytes


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
