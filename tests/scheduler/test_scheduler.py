"""The scheduler on tiny pools: exact batches, order, preemption; then random loads run to the end."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.errors import CapacityError, RequestError
from qkv_engine.kv.manager import KVManager
from qkv_engine.request import FinishReason, RequestStatus

from .common import BLOCK, make_scheduler, run, shape
from .common import make_request as make_any

make_request = partial(make_any, floor=0)  # ladders of one rung


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    scheduler = make_scheduler(8, budget=300)
    scheduler.add(make_request("a", 700))
    seen = []
    for _ in range(4):
        batch = scheduler.schedule()
        seen += shape(batch)
        run(scheduler, batch)
    assert seen == [("a", 0, 300), ("a", 300, 300), ("a", 600, 100), ("a", 700, 1)]


def test_decodes_share_a_step_with_a_prompt_and_come_first():
    scheduler = make_scheduler(8, budget=200)
    scheduler.add(make_request("a", 10))
    run(scheduler, scheduler.schedule())
    scheduler.add(make_request("b", 250))
    assert shape(scheduler.schedule()) == [("a", 10, 1), ("b", 0, 199)]


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit():
    scheduler = make_scheduler(4)
    scheduler.add(make_request("a", 2 * BLOCK))  # three blocks with what it may write
    run(scheduler, scheduler.schedule())
    scheduler.add(make_request("big", 2 * BLOCK))
    scheduler.add(make_request("small", 10))
    assert [item.request.request_id for item in scheduler.schedule().items] == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["big", "small"]


def test_max_num_seqs_bounds_the_running():
    scheduler = make_scheduler(8, seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 5))
    assert len(scheduler.schedule()) == 2 and len(scheduler.waiting) == 1


@pytest.fixture
def overcommitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that looks at nothing, so that memory runs out later."""
    monkeypatch.setattr(KVManager, "admits", lambda *args: True)


def test_the_youngest_is_preempted_and_recomputes_prompt_and_output(overcommitted: None):
    scheduler = make_scheduler(4)
    scheduler.add(make_request("old", BLOCK - 2, max_tokens=2 * BLOCK))
    scheduler.add(make_request("young", BLOCK - 1, max_tokens=2 * BLOCK))
    scheduler.schedule()
    scheduler.add(make_request("late", 5))
    while not scheduler.num_preemptions:
        run(scheduler, scheduler.schedule())
    # late's block was the first to go, then young wanted its third and gave way itself.
    young = scheduler.requests["young"]
    while young.status is RequestStatus.RUNNING:
        run(scheduler, scheduler.schedule())
    assert young.num_computed_tokens == 0
    assert [r.request_id for r in scheduler.waiting][:1] == ["young"]
    output = list(young.output_token_ids)
    while young.status is RequestStatus.WAITING:
        run(scheduler, scheduler.schedule())
    assert scheduler.requests["young"].output_token_ids[: len(output)] == output
    assert scheduler.requests["old"].num_preemptions == 0


def test_waiting_requests_are_served_by_priority_and_equals_in_order():
    scheduler = make_scheduler(4, budget=BLOCK)
    for name, priority in (("b", 1), ("d", 2), ("a", -5), ("c", 1)):
        scheduler.add(make_request(name, BLOCK, priority=priority))
    assert [r.request_id for r in scheduler.waiting] == ["a", "b", "c", "d"]
    assert shape(scheduler.schedule()) == [("a", 0, BLOCK)]


def test_the_less_urgent_gives_way_though_it_came_first(overcommitted: None):
    scheduler = make_scheduler(4)
    scheduler.add(make_request("low", BLOCK - 1, max_tokens=2 * BLOCK, priority=1))
    run(scheduler, scheduler.schedule())
    scheduler.add(make_request("high", BLOCK - 1, max_tokens=2 * BLOCK))
    while not scheduler.num_preemptions:
        run(scheduler, scheduler.schedule())
    assert scheduler.requests["low"].status is RequestStatus.WAITING
    assert scheduler.requests["high"].num_preemptions == 0


def test_admission_keeps_what_running_requests_may_still_write():
    scheduler = make_scheduler(4)
    scheduler.add(make_request("a", 10, max_tokens=3 * BLOCK))
    scheduler.add(make_request("b", 10, max_tokens=10))
    assert [item.request.request_id for item in scheduler.schedule().items] == ["a"]
    scheduler = make_scheduler(5)
    scheduler.add(make_request("a", 10, max_tokens=3 * BLOCK))
    scheduler.add(make_request("b", 10, max_tokens=10))
    assert [item.request.request_id for item in scheduler.schedule().items] == ["a", "b"]


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(2)
    scheduler.add(make_request("fits", 2 * BLOCK, max_tokens=1))
    with pytest.raises(CapacityError, match=r"257.*256"):
        scheduler.add(make_request("too big", 2 * BLOCK, max_tokens=2))


def test_a_live_id_is_refused_and_the_first_owner_is_untouched():
    scheduler = make_scheduler(4)
    first = make_request("a", 5)
    scheduler.add(first)
    with pytest.raises(RequestError, match="live request"):
        scheduler.add(make_request("a", 9))
    assert scheduler.requests["a"] is first
    scheduler.finish(first, FinishReason.ABORT)
    scheduler.add(make_request("a", 9))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_random_loads_end_with_every_block_free(seed: int):
    """Random pools, budgets, arrivals and aborts: invariants after every step, all answered at the end."""
    rng = random.Random(seed)
    blocks, budget, seqs = rng.randint(2, 12), rng.choice((1, 7, 64, 300)), rng.randint(1, 6)
    scheduler = make_scheduler(blocks, seqs=seqs, budget=budget)
    to_come = [
        make_request(f"r{i}", rng.randint(1, blocks * BLOCK // 2), rng.randint(1, blocks * BLOCK // 2))
        for i in range(rng.randint(1, 8))
    ]
    everyone = list(to_come)
    for _ in range(20_000):
        if to_come and (rng.random() < 0.05 or not scheduler.has_work):
            scheduler.add(to_come.pop())
        if scheduler.requests and rng.random() < 0.002:
            scheduler.finish(rng.choice(list(scheduler.requests.values())), FinishReason.ABORT)
        if not scheduler.has_work:
            if not to_come:
                break
            continue
        oldest = scheduler.running.first if scheduler.running else None
        before = 0 if oldest is None else oldest.num_preemptions
        batch = scheduler.schedule()
        assert 0 < batch.num_tokens <= budget
        assert oldest is None or oldest.num_preemptions == before
        assert set(scheduler.requests.values()) == set(scheduler.waiting) | set(scheduler.running)
        assert not set(scheduler.waiting) & set(scheduler.running)
        for request in scheduler.waiting:
            assert request.request_id not in scheduler.space.tables
        for item in batch.items:
            assert len(scheduler.space.tables.main[item.request.request_id].blocks) * BLOCK >= item.end
        scheduler.space.tables.check_integrity()
        run(scheduler, batch)
    assert not scheduler.has_work and not to_come
    assert all(r.is_finished for r in everyone)
    assert scheduler.space.free_blocks() == blocks
