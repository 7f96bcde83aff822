"""States that step down, on tiny pools: behind blocks and checkpoints, to floors, and how requests begin."""

from __future__ import annotations

import pytest

from qkv_engine.kv.block import Block
from qkv_engine.kv.moves import take_moves
from qkv_engine.kv.spec import KVSpec, RequestSlot, RungSize
from qkv_engine.scheduler import Scheduler
from qkv_engine.scheduler.coldest import Coldest

from .common import RUNGS, make_request, make_scheduler, make_space, make_spec, run
from .test_checkpoints import finished, go, ids

WIDE, NARROW = RungSize("float32", 32, 32.0, True), RungSize("int16", 16, 16.0)
STATE = RequestSlot("state", 0, 32, 0, True, (WIDE, NARROW))


def make_hybrid(floors: tuple[int, ...] = (0, 1), number: int = 2) -> KVSpec:
    return make_spec(RUNGS[: len(floors)], others=(STATE,) * number, state_floors=floors)


HYBRID = make_hybrid()


def states(scheduler: Scheduler, name: str) -> list[Block]:
    return scheduler.space.tables.main.states(name)


def steps(scheduler: Scheduler, name: str) -> list[int]:
    return [scheduler.space.spec.main.step_of(state.rung) for state in states(scheduler, name)]


def test_each_format_of_a_slot_has_a_rung_below_zero() -> None:
    group = make_spec(RUNGS[:2], sink=32, sink_nbytes=4, others=(STATE, STATE), state_floors=(0, 1)).main
    found = [(group.place(rung), group.nbytes(rung), group.name_of(rung)) for rung in reversed(group.slot_rungs)]
    assert found == [
        ((0, 0), 4, "sink"),
        ((1, 1), 16, "int16"),
        ((1, 0), 32, "float32"),
        ((2, 1), 16, "int16"),
        ((2, 0), 32, "float32"),
    ]
    assert group.widest_rungs == (-1, -3, -5) and [group.narrowest(rung) for rung in (-1, -3, -2, 0)] == [1, -2, -2, 1]
    assert group.slot_floors(0) == (0, -3, -5) and group.slot_floors(1) == (1, -2, -4)
    assert [group.slot_sizes(floor) for floor in (0, 1)] == [[4, 32, 32], [4, 16, 16]]


@pytest.mark.parametrize("floors", [(0, 2), (0,), (0, 1, 1), (0, 0)])
def test_floors_that_do_not_go_with_the_states_are_refused(floors: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of states"):
        make_spec(RUNGS[:2], others=(STATE,), state_floors=floors)


def test_states_follow_all_blocks_those_of_the_longest_request_first() -> None:
    scheduler = make_scheduler(40, HYBRID, slab_blocks=2)
    for name, length, floor in (("short", 150, 1), ("long", 200, 1), ("pinned", 300, 0)):
        scheduler.add(make_request(name, ids(length, length), 20, floor=floor, ignore_eos=True))
    go(scheduler, 3)
    space, running = scheduler.space, scheduler.running
    ranks = dict.fromkeys(space.aged(running), 0)
    found = Coldest(space, running, ranks).take(99)
    names = [(c.request.request_id, c.is_state, c.rung) for c in found]
    assert names == [
        *(("long", False, 0), ("short", False, 0)),
        *(("long", True, -2), ("long", True, -4), ("short", True, -2), ("short", True, -4)),
    ]


def test_a_pinned_request_keeps_wide_states_and_admission_counts_them() -> None:
    space, request = make_space(20, HYBRID, slab_blocks=2), make_request("a", ids(1, 5), 20, floor=0)
    narrow = make_request("b", ids(2, 5), 20, floor=1)
    for each in (request, narrow):
        space.open(each)
        assert space.reserve(each, 5)
    assert space.demand.total.slots(1) == {16: 4, 32: 2}  # two dense blocks, two states of each
    assert [list(space.unsettled(each)) for each in (request,)] == [[]]
    assert [age for block, age in space.unsettled(narrow) if block.rung < 0] == [0, 0] and space.aged(
        [request, narrow]
    ) == [narrow]
    assert space.tables.demand(5, 0)[32] == 2 and space.tables.demand(5, 1)[32] == 0


def test_a_state_that_nobody_wrote_takes_another_slot_and_no_bytes_move() -> None:
    space, request = make_space(20, HYBRID, slab_blocks=2), make_request("a", ids(1, 5), 20, floor=1)
    space.open(request)
    assert space.reserve(request, 5)
    (first, second), store = space.tables.main.states("a"), space.tables.store
    assert space.demote([(first, first.rung + 1)]) == 1 and not store.waves
    command, _ = take_moves(space.tables)
    assert (first.slot.address, 16) in command.fresh and not command.waves
    assert space.demote([(second, second.rung + 1)]) == 1
    ((move,),) = store.waves
    assert (move.old, move.new, move.src != move.dst) == (-4, -3, True)
    command, lost = take_moves(space.tables)
    ((launch,),) = [wave.launches for wave in command.waves]
    assert (launch.old, launch.new, launch.nbytes) == (-4, -3, 32) and lost == [second]
    space.tables.check_integrity()


def test_states_of_all_layers_go_in_one_launch() -> None:
    scheduler = make_scheduler(20, HYBRID, slab_blocks=2)
    scheduler.add(make_request("a", ids(1, 5), 20, floor=1))
    go(scheduler)
    take_moves(scheduler.space.tables)
    found = states(scheduler, "a")
    assert scheduler.space.demote([(state, state.rung + 1) for state in found]) == 2
    command, _ = take_moves(scheduler.space.tables)
    ((launch,),) = [wave.launches for wave in command.waves]
    assert launch.dst == [state.slot.address for state in found]


def test_checkpoints_step_down_and_go_before_live_states() -> None:
    scheduler = make_scheduler(24, HYBRID, slab_blocks=2, prefix=True)
    finished(scheduler, "old", ids(1, 300))
    checkpoints = scheduler.space.prefix.checkpoints
    kept = [slot for key in checkpoints for slot in checkpoints[key].slots]
    assert len(kept) == 2 and all(slot.slot.nbytes == 32 for slot in kept)
    seen = list[tuple[int, int]]()
    for number in range(12):
        scheduler.add(make_request(f"r{number}", ids(number + 2, 5), 100, floor=1, ignore_eos=True))
        go(scheduler)
        live = sum(sum(steps(scheduler, request.request_id)) for request in scheduler.running)
        idle = scheduler.space.tables.store.num_idle_demotions["float32", "int16"]
        seen.append((idle, live))
        assert not live or not len(checkpoints)
    assert any(idle == 2 and not live for idle, live in seen) and seen[-1][1] > 0


def test_a_preempted_request_begins_on_the_widest_rung() -> None:
    scheduler = make_scheduler(30, HYBRID, slab_blocks=2)
    request = make_request("a", ids(1, 5), 20, floor=1, ignore_eos=True)
    scheduler.add(request)
    go(scheduler)
    scheduler.space.demote([(state, state.rung + 1) for state in states(scheduler, "a")])
    assert steps(scheduler, "a") == [1, 1]
    scheduler._preempt(request)
    run(scheduler, scheduler.schedule())
    assert steps(scheduler, "a") == [0, 0] and request.num_preemptions == 1


def test_a_request_that_finds_no_room_otherwise_begins_on_narrow_states() -> None:
    """Alone, in the least memory that holds it on its floor: 2 states of 16 bytes, and 16 for its first block."""
    spec = make_hybrid()
    for blocks in range(4, 12):
        scheduler = make_scheduler(blocks, spec, slab_blocks=2)
        if scheduler.space.capacities[1] >= 5 > scheduler.space.capacities[0]:
            break
    else:
        pytest.fail("no memory holds the request on its floor alone")
    scheduler.add(make_request("a", ids(1, 4), 2, floor=1, ignore_eos=True))
    go(scheduler)
    assert steps(scheduler, "a") == [1, 1]


def test_who_begins_on_a_narrow_checkpoint_has_its_rungs_and_a_pinned_one_does_not() -> None:
    scheduler = make_scheduler(40, HYBRID, slab_blocks=2, prefix=True)
    finished(scheduler, "old", ids(1, 140))
    (checkpoint,) = (scheduler.space.prefix.checkpoints[key] for key in scheduler.space.prefix.checkpoints)
    scheduler.space.demote([(checkpoint.slots[1], checkpoint.slots[1].rung + 1)])
    scheduler.add(make_request("any", ids(1, 200), 20, floor=1, ignore_eos=True))
    scheduler.add(make_request("pinned", ids(1, 210), 20, floor=0, ignore_eos=True))
    batch = scheduler.schedule()
    assert [(item.request.request_id, item.start) for item in batch.items] == [("any", 128), ("pinned", 0)]
    assert steps(scheduler, "any") == [0, 1] and steps(scheduler, "pinned") == [0, 0]
    run(scheduler, batch)
    go(scheduler, 3)
    (again,) = {id(scheduler.space.prefix.checkpoints[key]) for key in scheduler.space.prefix.checkpoints}
    assert again != id(checkpoint)  # that of the pinned request, which is wider, took its place


def test_the_reserve_counts_states_as_a_group() -> None:
    chains = [(chain.sizes, chain.floors) for chain in HYBRID.chains]
    assert chains == [((16, 8), (0, 1)), ((32, 16), (0, 1))]
    assert [chain.sizes for chain in make_spec(RUNGS[:2], others=(STATE,)).chains] == [(16, 8)]


def test_a_start_on_narrow_states_narrows_those_of_a_wide_checkpoint() -> None:
    scheduler = make_scheduler(40, HYBRID, prefix=True, slab_blocks=2)
    finished(scheduler, "old", ids(1, 140))
    request = make_request("new", ids(1, 200), 20, floor=1, ignore_eos=True)
    assert scheduler.space.open(request) == 128
    assert scheduler.space.begin_narrower(request) and not scheduler.space.begin_narrower(request)
    assert scheduler.space.reserve(request, 129)
    ((first, second),) = scheduler.space.tables.store.waves
    assert [(move.old, move.new) for move in (first, second)] == [(-2, -1), (-4, -3)]
    (wave,) = take_moves(scheduler.space.tables)[0].waves
    assert [(launch.old, launch.new, launch.nbytes) for launch in wave.launches] == [(-2, -1, 32)]
