"""Turns of tenants: whose request starts next, and the places that a tenant leaves."""

from __future__ import annotations

import random

import pytest

from qkv_engine.scheduler import Scheduler
from qkv_engine.scheduler.queue import RequestQueue
from qkv_engine.scheduler.turns import in_turn, leaves_places

from .common import LADDER, make_request, make_space, run, shape


def make_scheduler(seqs: int, *, blocks: int = 64, budget: int = 512) -> Scheduler:
    return Scheduler(make_space(blocks, LADDER), max_num_seqs=seqs, max_num_batched_tokens=budget, takes_turns=True)


def add(scheduler: Scheduler, *names: str, prompt: int = 1, **params: object) -> None:
    """Adds requests; the tenant is the first letter of a name, "-" for none."""
    for name in names:
        scheduler.add(make_request(name, prompt, tenant=name[0].strip("-"), **params))


def started(scheduler: Scheduler) -> list[str]:
    """The requests that the next step starts."""
    before = {request.request_id for request in scheduler.running}
    batch = scheduler.schedule()
    run(scheduler, batch)
    return [item.request.request_id for item in batch.items if item.request.request_id not in before]


def test_who_has_the_fewest_running_is_next_and_of_equal_ones_who_came_first():
    scheduler = make_scheduler(64)
    add(scheduler, *(f"a{i}" for i in range(5)), "b0", "b1", "c0")
    assert started(scheduler) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_a_newcomer_comes_before_those_who_wait_behind_their_own():
    scheduler = make_scheduler(64, budget=128)
    add(scheduler, *(f"a{i}" for i in range(9)), prompt=100)
    assert started(scheduler) == ["a0", "a1"]
    add(scheduler, "b0")
    assert started(scheduler)[0] == "b0"  # behind what a1 lacks
    assert scheduler.requests["b0"].num_output_tokens == 1


def test_long_prompts_leave_an_eighth_of_a_step_to_who_has_none_running():
    scheduler = make_scheduler(64, budget=256)
    add(scheduler, "a0", "a1", prompt=2000)
    assert shape(scheduler.schedule()) == [("a0", 0, 256)]
    add(scheduler, "b0", prompt=20)
    add(scheduler, "b1", prompt=200)
    assert shape(scheduler.schedule()) == [("a0", 256, 224), ("b0", 0, 20), ("a1", 0, 12)]
    add(scheduler, "b2", prompt=200)
    assert shape(scheduler.schedule())[0] == ("a0", 480, 256)


def test_priorities_come_before_turns():
    scheduler = make_scheduler(64)
    add(scheduler, "b0", "b1", priority=1)
    add(scheduler, "a0", "a1", "a2")
    assert started(scheduler) == ["a0", "a1", "a2", "b0", "b1"]


def test_a_tenant_leaves_one_place_of_eight():
    scheduler = make_scheduler(16)
    add(scheduler, *(f"a{i}" for i in range(20)))
    assert len(started(scheduler)) == 14
    add(scheduler, "b0", "b1", "b2")
    assert started(scheduler) == ["b0"]  # another one could only come for who has none yet
    add(scheduler, "c0")
    assert started(scheduler) == ["c0"]


def test_who_has_no_name_takes_all_places():
    scheduler = make_scheduler(8)
    add(scheduler, *(f"-{i}" for i in range(9)))
    assert len(started(scheduler)) == 8


def test_without_turns_the_order_is_that_of_arrival():
    scheduler = Scheduler(make_space(64, LADDER), max_num_seqs=8, max_num_batched_tokens=512)
    add(scheduler, *(f"a{i}" for i in range(8)), "b0")
    assert started(scheduler) == [f"a{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("free", "most"), [(0, 0), (1, 1), (2, 7), (3, 14), (32, 217)]
)  # held with so many free: one more would leave too few
def test_places_by_what_is_free(free: int, most: int):
    assert [held for held in range(300) if leaves_places(held, free)] == list(range(most))


def test_in_turn_yields_each_request_once_and_a_tenant_s_own_in_order():
    draw = random.Random(0)
    for _ in range(50):
        waiting, running = RequestQueue(), RequestQueue()
        for arrival in range(draw.randrange(1, 30)):
            request = make_request(f"r{arrival}", 1, tenant=draw.choice("abc"), priority=draw.randrange(2))
            request.arrival = arrival
            waiting.add(request)
        for request in in_turn(waiting, running):
            own = [r for r in waiting if r.params.tenant == request.params.tenant and r not in running]
            others = [r for r in waiting if r not in running and r.params.priority <= request.params.priority]
            fewest = min(running.number_of(r.params.tenant) for r in others)
            assert request is own[0] and min(r.params.priority for r in others) == request.params.priority
            assert running.number_of(request.params.tenant) == fewest
            running.add(request)
        assert len(running) == len(waiting) and set(running.tenants) == set(waiting.tenants)
