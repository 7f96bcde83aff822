"""What steps down, when, and whose blocks: exact blocks on tiny arenas."""

from __future__ import annotations

import logging

import pytest

from qkv_engine.kv.manager import KVManager
from qkv_engine.request import Request
from qkv_engine.scheduler import Scheduler

from .common import BLOCK, LADDER, RUNGS, make_request, make_scheduler, make_spec, run, shape

EAGER = make_spec(RUNGS, recent=BLOCK, eager=True)


def step(scheduler: Scheduler, times: int = 1) -> None:
    for _ in range(times):
        run(scheduler, scheduler.schedule())


def step_down(scheduler: Scheduler, number: int, tenant: str | None = "") -> int:
    """Steps blocks down as if room for 999 lacked; returns how many did."""
    return scheduler.pressure._step_down(tenant, number, scheduler.space.shortage_of(999))


def rungs(scheduler: Scheduler, *names: str) -> list[list[int]]:
    return [[block.rung for block in scheduler.space.tables.main[name].blocks] for name in names]


def started(scheduler: Scheduler, *requests: Request) -> Scheduler:
    """Adds requests and computes their prompts."""
    for request in requests:
        scheduler.add(request)
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in requests):
        step(scheduler)
    return scheduler


def ids(salt: int, blocks: float) -> list[int]:
    return [salt] * int(blocks * BLOCK)


def test_nothing_steps_down_while_there_is_room():
    scheduler = started(make_scheduler(12, LADDER), make_request("a", ids(1, 3.5)), make_request("b", ids(2, 3.5)))
    step(scheduler, 4)
    assert rungs(scheduler, "a", "b") == [[0] * 4, [0] * 4]


def two_running(max_tokens: int) -> Scheduler:
    """Two requests that fill five of six blocks beside the reserve, each with room for 64 tokens more."""
    a, b = make_request("a", ids(1, 2.5), max_tokens), make_request("b", ids(2, 1.5), max_tokens)
    return started(make_scheduler(8, LADDER), a, b)


def test_room_is_made_ahead_of_need_a_block_a_step_once_requests_are_about_to_begin_a_block():
    scheduler = two_running(100)
    step(scheduler, 61)
    assert rungs(scheduler, "a", "b") == [[0, 0, 0], [0, 0]]
    step(scheduler)  # 4 tokens are left
    assert rungs(scheduler, "a", "b") == [[1, 0, 0], [0, 0]]  # the coldest: oldest tokens of the longest request
    step(scheduler)
    assert rungs(scheduler, "a", "b") == [[1, 1, 0], [0, 0]]
    step(scheduler, 2)
    assert rungs(scheduler, "a", "b") == [[1, 1, 0, 0], [0, 0, 0]]


def test_no_block_steps_down_for_requests_that_end_before_they_need_another():
    scheduler = two_running(65)
    step(scheduler, 63)
    assert rungs(scheduler, "a", "b") == [[0, 0, 0], [0, 0]] and len(scheduler.running) == 2
    step(scheduler)
    assert not scheduler.has_work and not scheduler.space.tables.store.num_demotions


def test_as_many_blocks_step_down_as_are_needed_and_no_more():
    scheduler = started(make_scheduler(10, LADDER, budget=2000), make_request("a", ids(1, 7.5)))
    assert scheduler.space.free_blocks() == 0
    started(scheduler, make_request("b", ids(2, 0.5)))
    assert rungs(scheduler, "a", "b") == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0],
    ]  # two of 8 bits fill a slab as large as a block


def test_no_block_steps_down_for_a_waiting_request_that_could_not_start_by_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVManager, "admits", lambda *args: True)
    wide = make_request("wide", ids(2, 6.5), floor=0)
    scheduler = started(make_scheduler(10, LADDER, budget=2000), make_request("a", ids(1, 0.9)), wide)
    assert scheduler.space.free_blocks() == 0
    step(scheduler, 5)
    (full, *_), waiting = scheduler.space.tables.main["wide"].blocks, make_request("late", ids(3, 0.5))
    full.floor = 1  # the only one that may step down, which leaves no room: it begins a slab of its own
    scheduler.add(waiting)
    step(scheduler)
    assert waiting in scheduler.waiting and full.rung == 0


def test_the_widest_go_first_and_among_them_the_coldest():
    scheduler = make_scheduler(40, LADDER)
    started(scheduler, make_request("a", ids(1, 3.5)), make_request("b", ids(2, 2.5)))
    scheduler.space.demote([(scheduler.space.tables.main["a"].blocks[0], 1)])
    scheduler.pressure.forget()
    step_down(scheduler, 3)
    assert rungs(scheduler, "a", "b") == [[1, 1, 1, 0], [1, 0, 0]]
    step_down(scheduler, 2)  # b's second is the last wide one that is full; then a's oldest goes on
    assert rungs(scheduler, "a", "b") == [[2, 1, 1, 0], [1, 1, 0]]


def test_open_blocks_and_the_recent_window_stay():
    scheduler = make_scheduler(40, make_spec(RUNGS, recent=100))
    started(scheduler, make_request("a", ids(1, 3.5)))  # 449 tokens: the third block ends 65 tokens ago
    scheduler.pressure.forget()
    assert step_down(scheduler, 99) == 2
    assert rungs(scheduler, "a") == [[1, 1, 0, 0]]


def test_a_block_that_others_share_goes_last_and_as_the_newest_holder_sees_it():
    scheduler = make_scheduler(40, make_spec(RUNGS, recent=64), prefix=True)
    started(scheduler, make_request("a", ids(1, 2.9) + ids(2, 1)))
    started(scheduler, make_request("b", ids(1, 2.2)))
    a, b = (scheduler.space.tables.main[name].blocks for name in "ab")
    assert a[:2] == b[:2] and a[0].is_shared and not a[2].is_shared
    scheduler.pressure.forget()
    assert step_down(scheduler, 1) == 1
    assert rungs(scheduler, "a") == [[0, 0, 1, 0]]
    # The second block is old to a but in b's window: 282 - 64 tokens lie before it.
    step_down(scheduler, 1), step_down(scheduler, 1)
    assert rungs(scheduler, "a", "b") == [[1, 0, 2, 0], [1, 0, 0]]


def test_floors_and_pinned_requests_are_respected():
    scheduler = make_scheduler(40, LADDER)
    started(
        scheduler,
        make_request("pinned", ids(1, 1.5), floor=0),
        make_request("int8", ids(2, 1.5), floor=1),
        make_request("any", ids(3, 1.5)),
    )
    scheduler.pressure.forget()
    while step_down(scheduler, 99):
        pass
    assert rungs(scheduler, "pinned", "int8", "any") == [[0, 0], [1, 0], [2, 0]]
    assert scheduler.space.usage(scheduler.requests["int8"]).blocks == {"dense16": 1, "int8": 1}
    assert scheduler.space.usage(scheduler.requests["any"]).lowest_bits == 4.0


def test_a_floor_is_respected_when_its_owner_joined_during_the_same_step():
    scheduler = make_scheduler(40, LADDER, prefix=True)
    started(scheduler, make_request("a", ids(1, 1.5)))
    scheduler.pressure.forget()
    step_down(scheduler, 0)  # the coldest blocks are looked up
    pinned = make_request("pinned", ids(1, 1.2), floor=0)
    scheduler.add(pinned)
    scheduler._admit(512)
    assert pinned.num_cached_tokens == BLOCK
    assert step_down(scheduler, 99) == 0


def test_who_left_or_got_a_block_lacks_none():
    scheduler = started(make_scheduler(8, LADDER), *(make_request(name, ids(1, 1)) for name in "abc"))
    a, b, c = scheduler.running
    pressure = scheduler.pressure
    pressure.begin_step()
    assert {r.num_computed_tokens for r in (a, b, c)} == {BLOCK} and pressure._num_lacking(a) == 2
    assert pressure.make_room(b, BLOCK + 1) and pressure._num_lacking(a) == 1
    scheduler._preempt(c)
    assert pressure._num_lacking(a) == 0 and pressure._num_lacking(b) == 1


def test_an_eager_ladder_settles_after_the_prompt_and_not_within_it():
    scheduler = make_scheduler(20, EAGER, budget=2 * BLOCK)
    scheduler.add(make_request("a", ids(1, 4.5), 3 * BLOCK))
    step(scheduler, 2)
    assert rungs(scheduler, "a") == [[0] * 4]
    step(scheduler)
    assert rungs(scheduler, "a") == [[0] * 5]  # the prompt was not complete when the step began
    step(scheduler)
    assert rungs(scheduler, "a") == [[2, 2, 2, 0, 0]]
    step(scheduler, BLOCK // 2)
    assert rungs(scheduler, "a") == [[2, 2, 2, 2, 0, 0]]


def test_an_eager_block_that_two_requests_share_steps_down_once():
    scheduler = make_scheduler(40, make_spec(RUNGS, eager=True), prefix=True)
    scheduler.add(make_request("a", ids(1, 1.5), 40))
    step(scheduler)
    scheduler.add(make_request("b", ids(1, 1.2), 40))  # shares the first block before it steps down
    batch = scheduler.schedule()
    assert ("b", BLOCK, int(0.2 * BLOCK)) in shape(batch)
    run(scheduler, batch)
    step(scheduler, 2)
    assert rungs(scheduler, "a", "b") == [[2, 0], [2, 0]]
    assert scheduler.space.tables.store.num_demotions.total() == 1


def test_a_tenants_own_blocks_go_first():
    scheduler = make_scheduler(40, LADDER)
    started(scheduler, make_request("a", ids(1, 3.5), tenant="x"), make_request("b", ids(2, 1.5), tenant="y"))
    scheduler.pressure.forget()
    step_down(scheduler, 1, "y")
    assert rungs(scheduler, "a", "b") == [[0] * 4, [1, 0]]
    step_down(scheduler, 2, "y")  # its own once more before anybody else's
    assert rungs(scheduler, "a", "b") == [[1, 0, 0, 0], [2, 0]]


def test_within_the_quota_a_tenant_pays_for_nobody():
    scheduler = make_scheduler(20, LADDER, quota=0.2)  # 64 bytes: four dense blocks
    victim = make_request("victim", ids(1, 2.5), 40, tenant="v")
    started(scheduler, victim, make_request("attacker", ids(2, 6.5), 40, tenant="a"))
    for tenant in ("a", None):
        scheduler.pressure.forget()
        while step_down(scheduler, 4, tenant):
            pass
        assert rungs(scheduler, "victim") == [[0] * 3]
    assert max(rungs(scheduler, "attacker")[0]) > 0
    scheduler.pressure.forget()
    assert step_down(scheduler, 1, "v") == 1  # its own are left when the other is within the quota again


def test_an_attacker_at_full_rate_changes_nothing_for_a_victim_within_its_quota():
    scheduler = make_scheduler(24, LADDER, quota=0.4, seqs=16, budget=600)
    scheduler.add(make_request("victim", ids(1, 2.5), 3 * BLOCK, tenant="v"))
    victim = scheduler.requests["victim"]
    for round_ in range(3 * BLOCK + 8):
        for index in range(2):
            if len(scheduler.waiting) < 8:
                name = f"attack{round_}/{index}"
                scheduler.add(make_request(name, ids(2 + round_, 1.5 + index), BLOCK, tenant="a"))
        step(scheduler)
        if victim.is_finished:
            break
        assert not any(rungs(scheduler, "victim")[0])
    assert victim.is_finished and victim.num_preemptions == 0
    assert scheduler.space.tables.store.num_demotions.total() > 0  # the attacker's own


def test_a_chunk_leaves_the_others_their_next_block(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVManager, "admits", lambda *args: True)
    scheduler = make_scheduler(4, budget=600)
    young, old = (make_request(*args, floor=0) for args in (("young", BLOCK - 1, 4), ("old", 4 * BLOCK, 1)))
    young.arrival = 1
    scheduler._arrivals = iter((1, 0))
    started(scheduler, young)  # its next token but one begins a block
    step(scheduler)
    scheduler.add(old)
    assert ("young", BLOCK, 1) in shape(scheduler.schedule())
    assert len(scheduler.space.tables.main["old"].blocks) == 2


def test_nothing_steps_down_for_a_chunk_where_the_slab_that_it_begins_takes_the_next_block():
    sink = 32
    window = make_spec(RUNGS[:2], visible=BLOCK + 1, sink=sink, sink_nbytes=4)
    scheduler = make_scheduler(15, window, slab_blocks=4, budget=5000)  # beside reserve and sinks 7 blocks
    for name in "ab":
        scheduler.add(make_request(name, sink + 12 * BLOCK, 1, floor=1))
    first = scheduler.schedule()
    assert shape(first) == [("a", 0, sink + 7 * BLOCK), ("b", 0, sink)]
    run(scheduler, first)
    # What A's window holds could step down, but a slab is four blocks and one is left.
    assert shape(scheduler.schedule()) == [("a", sink + 7 * BLOCK, 5 * BLOCK), ("b", sink, BLOCK)]
    assert scheduler.num_preemptions == 0 and rungs(scheduler, "a", "b") == [[0] * 6, [0]]


def test_requests_that_fit_on_their_floors_run_together_without_preemption():
    scheduler = make_scheduler(12, LADDER, seqs=16, budget=300)
    requests = [make_request(f"r{i}", ids(i, 3.3), BLOCK) for i in range(7)]
    for request in requests:
        scheduler.add(request)
    together = 0
    while scheduler.has_work:
        step(scheduler)
        together = max(together, len(scheduler.running))
    # Ten slabs, two of which hold the reserve: at 16 bits two requests would fit.
    assert together >= 5 and scheduler.num_preemptions == 0
    assert all(request.num_output_tokens == BLOCK for request in requests)


def test_admit_at_a_wider_rung_queues_instead():
    narrow, wide = (make_scheduler(12, make_spec(RUNGS, admit_at=rung), seqs=16, budget=2000) for rung in (2, 0))
    for scheduler in (narrow, wide):
        for index in range(6):
            scheduler.add(make_request(f"r{index}", ids(index, 2.5), 2))
        scheduler.schedule()
    assert len(wide.running) == 3 and len(narrow.running) > 3


def test_what_fits_only_on_its_floor_runs_alone_when_admission_counts_wider():
    scheduler = make_scheduler(6, make_spec(RUNGS, admit_at=0), budget=100)
    scheduler.add(make_request("long", ids(1, 8), 2))
    scheduler.add(make_request("next", ids(2, 1), 2))
    while "long" in scheduler.requests:
        step(scheduler)
        assert len(scheduler.running) <= 1
    assert scheduler.num_preemptions == 0


def test_demotions_are_explained_in_the_log(caplog: pytest.LogCaptureFixture):
    scheduler = make_scheduler(40, LADDER)
    started(scheduler, make_request("a", ids(1, 3.5)))
    with caplog.at_level(logging.INFO, "qkv_engine"):
        scheduler.pressure.forget()
        step_down(scheduler, 2)
        step_down(scheduler, 1)
    assert "a: 2 blocks (256 tokens) stepped down dense16 -> int8; free 16-bit blocks 34 -> 35" in caplog.text
    assert "a: 1 block (128 tokens) stepped down" in caplog.text
