"""The scheduler on tiny pools: exact batches, order, preemption; then random loads run to the end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.errors import CapacityError, RequestError
from qkv_engine.kv.arena import Arena
from qkv_engine.kv.table import BlockTables
from qkv_engine.request import FinishReason, Request, RequestStatus, SamplingParams
from qkv_engine.scheduler import ScheduledBatch, Scheduler

BLOCK = 128


def make_scheduler(num_blocks: int, *, seqs: int = 8, budget: int = 512) -> Scheduler:
    tables = BlockTables(Arena(num_blocks * 10, 10), 10)
    return Scheduler(tables, max_num_seqs=seqs, max_num_batched_tokens=budget)


def make_request(name: str, prompt: int, max_tokens: int = 8) -> Request:
    return Request(name, [1] * prompt, SamplingParams(temperature=0.0), max_tokens)


def run(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """What a step does: KV computed, one token sampled at the end of what is known, length respected."""
    for item in batch.items:
        scheduler.computed(item)
        if item.end == item.request.num_tokens:
            scheduler.append_token(item.request, 7)
            if item.request.num_output_tokens == item.request.max_tokens:
                scheduler.finish(item.request, FinishReason.LENGTH)


def shape(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in batch.items]


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
    scheduler.add(make_request("a", 2 * BLOCK))
    run(scheduler, scheduler.schedule())  # a holds 2 blocks and wants a third soon
    scheduler.add(make_request("big", 2 * BLOCK))
    scheduler.add(make_request("small", 10))
    assert [item.request.request_id for item in scheduler.schedule().items] == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["big", "small"]


def test_max_num_seqs_bounds_the_running():
    scheduler = make_scheduler(8, seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 5))
    assert len(scheduler.schedule()) == 2 and len(scheduler.waiting) == 1


def test_the_youngest_is_preempted_and_recomputes_prompt_and_output():
    scheduler = make_scheduler(4)
    scheduler.add(make_request("old", BLOCK - 2, max_tokens=2 * BLOCK))
    scheduler.add(make_request("young", BLOCK - 1, max_tokens=2 * BLOCK))
    while not scheduler.num_preemptions:
        run(scheduler, scheduler.schedule())
    young = scheduler.requests["young"]
    assert young.status is RequestStatus.WAITING and young.num_computed_tokens == 0
    assert scheduler.space.num_free_blocks == 4 - 2  # young wanted a third block first, and gave way itself
    output = list(young.output_token_ids)
    while young.status is RequestStatus.WAITING:
        run(scheduler, scheduler.schedule())
    assert scheduler.requests["young"].output_token_ids[: len(output)] == output
    assert "old" not in scheduler.requests and young.num_preemptions == 1


def test_a_preempted_request_goes_before_later_arrivals():
    scheduler = make_scheduler(4)
    scheduler.add(make_request("old", BLOCK - 2, max_tokens=2 * BLOCK))
    scheduler.add(make_request("young", BLOCK - 1, max_tokens=2 * BLOCK))
    scheduler.schedule()
    scheduler.add(make_request("late", 5))
    while not scheduler.num_preemptions:
        run(scheduler, scheduler.schedule())
    assert [r.request_id for r in scheduler.waiting] == ["young", "late"]


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


@settings(max_examples=150, deadline=None, derandomize=True)
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
        oldest = scheduler.running.oldest if scheduler.running else None
        before = 0 if oldest is None else oldest.num_preemptions
        batch = scheduler.schedule()
        assert 0 < batch.num_tokens <= budget
        assert oldest is None or oldest.num_preemptions == before
        assert set(scheduler.requests.values()) == set(scheduler.waiting) | set(scheduler.running)
        assert not set(scheduler.waiting) & set(scheduler.running)
        for request in scheduler.waiting:
            assert request.request_id not in scheduler.space
        for item in batch.items:
            assert scheduler.space[item.request.request_id].num_tokens >= item.end
        scheduler.space.check_integrity()
        run(scheduler, batch)
    assert not scheduler.has_work and not to_come
    assert all(r.is_finished for r in everyone)
    assert scheduler.space.num_free_blocks == blocks
