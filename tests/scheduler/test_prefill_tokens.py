"""``num_prefill_tokens``: prompt tokens behind them are computed as if they had been generated."""

from __future__ import annotations

from fractions import Fraction

from qkv_engine.scheduler import Scheduler

from .common import BLOCK, DENSE, RUNGS, make_request, make_scheduler, make_spec, run, shape

EAGER = make_spec(RUNGS, sink=32, sink_nbytes=4, recent=BLOCK, eager=True)
GROWING = make_spec(RUNGS, recent_ratio=Fraction(1, 5), eager=True)


def chunks(scheduler: Scheduler, steps: int) -> list[tuple[int, int]]:
    """Start and length of the work of the only request in each of the next steps."""
    found = []
    for _ in range(steps):
        batch = scheduler.schedule()
        found += [(start, num_tokens) for _, start, num_tokens in shape(batch)]
        run(scheduler, batch)
    return found


def test_chunks_end_with_the_prefill_and_where_a_block_may_step_down():
    scheduler = make_scheduler(20, EAGER, budget=2048)
    scheduler.add(make_request("a", 700, num_prefill_tokens=200))
    # Block k ends at 160 + 128 k, and may step down 128 tokens later.
    assert chunks(scheduler, 5) == [(0, 200), (200, 88), (288, 128), (416, 128), (544, 128)]


def test_chunks_follow_a_window_that_grows():
    scheduler = make_scheduler(20, GROWING, budget=2048)
    scheduler.add(make_request("a", 500, num_prefill_tokens=1))
    assert chunks(scheduler, 5) == [(0, 1), (1, 158), (159, 160), (319, 160), (479, 21)]


def test_nothing_but_the_budget_cuts_what_never_steps_down():
    for ladder in (EAGER, DENSE):
        scheduler = make_scheduler(20, ladder, budget=400)
        scheduler.add(make_request("a", 700, num_prefill_tokens=100, floor=0))
        assert chunks(scheduler, 3) == [(0, 100), (100, 400), (500, 200)]


def test_all_aged_blocks_stand_on_their_floor_before_the_first_token_behind_the_prefill():
    scheduler = make_scheduler(60, EAGER, budget=4096)
    prompt = 32 + 20 * BLOCK
    scheduler.add(make_request("scored", prompt + 5, num_prefill_tokens=prompt))
    scheduler.add(make_request("served", [2] * prompt))
    run(scheduler, scheduler.schedule())
    while scheduler.requests["served"].num_computed_tokens < prompt:
        run(scheduler, scheduler.schedule())
    scheduler.schedule()
    rungs = {
        name: [block.rung for block in scheduler.space.tables.main[name].blocks[:19]] for name in ("scored", "served")
    }
    assert rungs["scored"] == [2] * 19
    assert rungs["served"].count(2) == 8  # in turns, eight blocks a step


def test_a_recomputed_request_is_cut_at_the_same_places_behind_its_prefill():
    scheduler = make_scheduler(20, EAGER, budget=2048)
    request = make_request("a", 300, max_tokens=300, num_prefill_tokens=200)
    scheduler.add(request)
    assert chunks(scheduler, 150)[:3] == [(0, 200), (200, 88), (288, 12)]
    request.token_ids[300:] = [9] * request.num_output_tokens
    scheduler._preempt(request)
    assert chunks(scheduler, 4) == [(0, 200), (200, 88), (288, 128), (416, 32)]
    assert request.num_tokens == 449


def test_its_blocks_are_shared_with_nobody():
    scheduler = make_scheduler(20, EAGER, budget=4096, prefix=True)
    prompt = list(range(5 * BLOCK))
    hits = []
    for name, prefill in (("a", 400), ("b", None), ("c", 400), ("d", None)):
        request = make_request(name, prompt, max_tokens=1, num_prefill_tokens=prefill)
        scheduler.add(request)
        while not request.is_finished:
            run(scheduler, scheduler.schedule())
        hits.append(request.num_cached_tokens > 0)
    assert hits == [False, False, False, True]
