"""Idle cached blocks under pressure: they step down and are given up before a running request pays anything."""

from __future__ import annotations

import logging

import pytest

from qkv_engine.request import FinishReason
from qkv_engine.scheduler import Scheduler

from .common import BLOCK, LADDER, RUNGS, make_request, make_scheduler, make_spec
from .test_pressure import ids, rungs, started, step


def ended(scheduler: Scheduler, name: str, salt: int, blocks: float, *, floor: int = 2) -> Scheduler:
    """Computes a prompt whose full blocks stay cached."""
    started(scheduler, make_request(name, ids(salt, blocks), floor=floor))
    scheduler.finish(scheduler.requests[name], FinishReason.ABORT)
    return scheduler


def cached(scheduler: Scheduler, salt: int, num_blocks: int) -> list[int]:
    """The rungs of the cached blocks of a prompt."""
    hit = scheduler.space.prefix.lookup(ids(salt, num_blocks + 3), "", 2, num_blocks * BLOCK)
    return [block.rung for block in hit.blocks]


def steps(scheduler: Scheduler) -> tuple[int, int]:
    """Blocks of running requests and idle ones that stepped down."""
    store = scheduler.space.tables.store
    return store.num_demotions.total(), store.num_idle_demotions.total()


def test_idle_blocks_step_down_as_far_as_they_must_and_none_is_given_up():
    scheduler = ended(make_scheduler(8, LADDER, prefix=True), "gone", 1, 3.5)
    started(scheduler, make_request("a", ids(2, 3.5)))  # 6 blocks and a slab of the reserve: 3 cached ones, 4 new
    assert rungs(scheduler, "a") == [[0] * 4] and cached(scheduler, 1, 3) == [0, 1, 1] and steps(scheduler) == (0, 2)
    assert scheduler.space.tables.arena.used_nbytes == (4 + 1) * 16 + 2 * 8


def test_idle_blocks_are_given_up_when_none_can_step_down_and_before_a_request_pays():
    scheduler = ended(make_scheduler(8, LADDER, prefix=True), "gone", 1, 4.5)
    started(scheduler, make_request("a", ids(2, 5.5), 100))
    assert rungs(scheduler, "a") == [[0] * 6] and steps(scheduler) == (0, 8)
    assert cached(scheduler, 1, 4) == [] and scheduler.space.prefix.idle.nbytes == 0
    step(scheduler, 65)  # it begins a block
    assert rungs(scheduler, "a") == [[1, 1, 0, 0, 0, 0, 0]] and steps(scheduler) == (2, 8)


def test_a_hit_on_narrow_blocks_saves_its_tokens():
    scheduler = ended(make_scheduler(8, LADDER, prefix=True), "gone", 1, 3.5)
    ended(scheduler, "other", 2, 4.5)
    again = make_request("again", ids(1, 3.5))
    started(scheduler, again)
    assert again.num_cached_tokens == 3 * BLOCK and sum(again.cached_tokens.values()) == 3 * BLOCK
    assert set(again.cached_tokens) <= {"int8", "int4"}


def test_nothing_yields_to_a_waiting_request_that_could_not_start_by_it():
    """Idle blocks share a slab with a running request's, so that giving them up would win nothing."""
    scheduler = ended(make_scheduler(9, LADDER, prefix=True), "gone", 1, 2.5)
    started(scheduler, make_request("a", ids(2, 2.5), 40))
    tables = scheduler.space.tables
    assert scheduler.space.demote([(block, 2) for block in (*scheduler.space.idle(9), *tables.main["a"].blocks[:2])])
    started(scheduler, make_request("b", ids(3, 4.5), 40, floor=0))
    assert tables.arena.used_nbytes == 4 * 4 + 6 * 16
    scheduler.space.admits = lambda request: True
    scheduler.add(make_request("c", ids(4, 0.5), floor=0))
    done = steps(scheduler)
    step(scheduler, 3)
    assert [request.request_id for request in scheduler.waiting] == ["c"]
    assert cached(scheduler, 1, 2) == [2, 2] and steps(scheduler) == done
    scheduler.finish(scheduler.requests["a"], FinishReason.ABORT)  # now they may win a slab
    step(scheduler)
    assert not scheduler.waiting and cached(scheduler, 1, 2) == [2, 2]


def test_room_is_made_ahead_of_need_by_idle_blocks_first_one_for_two_requests_a_step():
    scheduler = ended(make_scheduler(8, LADDER, prefix=True), "gone", 1, 1.5)
    started(scheduler, make_request("a", ids(2, 2.5), 100), make_request("b", ids(3, 1.5), 100))
    found = []
    for _ in range(66):
        step(scheduler)
        if not found or found[-1] != (*steps(scheduler), len(cached(scheduler, 1, 1))):
            found.append((*steps(scheduler), len(cached(scheduler, 1, 1))))
    assert found == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 2, 0), (2, 2, 0)]


def test_an_eager_ladder_steps_idle_blocks_down_when_room_lacks():
    scheduler = ended(make_scheduler(8, make_spec(RUNGS, recent=BLOCK, eager=True), prefix=True), "gone", 1, 3.5)
    assert cached(scheduler, 1, 3) == [0, 0, 0]
    step(scheduler, 3)
    assert cached(scheduler, 1, 3) == [0, 0, 0]
    started(scheduler, make_request("a", ids(2, 3.5)))
    assert cached(scheduler, 1, 3) == [0, 1, 1]


def test_quotas_leave_idle_blocks_to_all():
    scheduler = make_scheduler(8, LADDER, prefix=True, quota=0.9)
    started(scheduler, make_request("gone", ids(1, 3.5), tenant="x"))
    scheduler.finish(scheduler.requests["gone"], FinishReason.ABORT)
    started(scheduler, make_request("a", ids(2, 3.5), tenant="y"))
    assert cached(scheduler, 1, 3) == [0, 1, 1] and steps(scheduler) == (0, 2)


def test_the_log_tells_of_idle_blocks(caplog: pytest.LogCaptureFixture):
    scheduler = ended(make_scheduler(8, LADDER, prefix=True), "gone", 1, 3.5)
    with caplog.at_level(logging.INFO, "qkv_engine"):
        started(scheduler, make_request("a", ids(2, 3.5)))
    assert "2 idle cached blocks stepped down; free 16-bit blocks 3 -> 4" in caplog.text


def test_a_request_that_starts_again_tells_what_it_found_at_first():
    scheduler = ended(make_scheduler(12, LADDER, prefix=True), "gone", 1, 3.5)
    request = make_request("a", ids(1, 3.5))
    started(scheduler, request)
    assert request.cached_tokens == {"dense16": 3 * BLOCK}
    scheduler._preempt(request)
    scheduler.space.prefix.clear()
    step(scheduler)
    assert (request.num_cached_tokens, request.cached_tokens, request.found_tokens) == (
        3 * BLOCK,
        {"dense16": 3 * BLOCK},
        {},
    )


def test_a_shrink_steps_idle_blocks_down_then_gives_them_up_and_then_a_request_pays():
    scheduler = ended(make_scheduler(12, LADDER, prefix=True), "gone", 1, 3.5)
    started(scheduler, make_request("a", ids(2, 3.5), 100))
    arena = scheduler.space.tables.arena
    found = []
    for blocks in range(9, 3, -1):
        scheduler.space.resize(16 * blocks)
        while arena.is_shrinking:
            step(scheduler)
        found.append((cached(scheduler, 1, 3), *rungs(scheduler, "a")))
    assert found == [
        ([0, 0, 0], [0, 0, 0, 0]),
        ([0, 1, 1], [0, 0, 0, 0]),
        ([2, 2, 2], [0, 0, 0, 0]),
        ([], [0, 0, 0, 0]),
        ([], [1, 1, 0, 0]),
        ([], [2, 2, 2, 0]),
    ]
