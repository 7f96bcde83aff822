"""A deterministic scheduler: prompts block by block, generated tokens one by one, blocks that step down by position."""

from __future__ import annotations

from itertools import pairwise

import pytest

from qkv_engine.errors import QKVError
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.prefix import PrefixCache
from qkv_engine.scheduler import Scheduler

from .common import BLOCK, DENSE, RUNGS, FixedPace, make_space, make_spec, run, shape
from .common import make_request as make_any_request

EAGER = make_spec(RUNGS, sink=32, sink_nbytes=4, recent=BLOCK, eager=True)
AT_ONCE = make_spec(RUNGS, sink=32, sink_nbytes=4, eager=True)


def make_scheduler(num_blocks: int, spec, *, budget: int = 2048, pace=None) -> Scheduler:
    tables = make_space(num_blocks, spec).tables
    space = KVManager(tables, PrefixCache(tables, "model"), deterministic=True)
    return Scheduler(space, max_num_seqs=8, max_num_batched_tokens=budget, pace=pace, deterministic=True)


def make_request(name: str, prompt: int | list[int], max_tokens: int = 8, *, floor: int = 0):
    return make_any_request(name, prompt, max_tokens, floor=floor)


def work(scheduler: Scheduler, steps: int) -> list[list[tuple[str, int, int]]]:
    """Request, start and length of all items of the next steps."""
    found = []
    for _ in range(steps):
        batch = scheduler.schedule()
        found.append(shape(batch))
        run(scheduler, batch)
    return found


def of(name: str, found: list[list[tuple[str, int, int]]]) -> list[tuple[int, int]]:
    return [(start, number) for step in found for who, start, number in step if who == name]


@pytest.mark.parametrize("spec", [DENSE, EAGER], ids=["dense", "eager"])
@pytest.mark.parametrize("budget", [128, 300, 4096])
def test_chunks_end_where_blocks_do_and_where_the_prompt_does(spec, budget):
    scheduler, sink = make_scheduler(60, spec, budget=budget), spec.sink
    for name, number in (("a", 300), ("b", 161), ("c", 1)):
        scheduler.add(make_request(name, [len(name), number] * number, max_tokens=3, floor=spec.num_rungs - 1))
    found = work(scheduler, 24)
    ends = [sink] * bool(sink) + [sink + BLOCK * i for i in range(1, 9)]
    for name, number in (("a", 600), ("b", 322), ("c", 2)):
        cuts = [0, *(end for end in ends if end < number), number]
        chunks = [(first, last - first) for first, last in pairwise(cuts)]
        assert of(name, found) == [*chunks, (number, 1), (number + 1, 1)]


def test_a_whole_chunk_or_none_is_computed_beside_single_tokens():
    scheduler = make_scheduler(60, DENSE, budget=130)
    for name in "abc":
        scheduler.add(make_request(name, 1, max_tokens=4))
    scheduler.add(make_request("long", 200, max_tokens=1))
    found = work(scheduler, 6)
    assert of("long", found) == [(0, 128), (128, 72)]
    assert found[0] == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]  # 127 tokens are left
    assert len(found[4]) == 1


def test_a_pace_leaves_a_whole_chunk():
    scheduler = make_scheduler(60, DENSE, pace=FixedPace(64))
    scheduler.add(make_request("a", 1, max_tokens=8))
    run(scheduler, scheduler.schedule())
    scheduler.add(make_request("b", 200, max_tokens=1))
    assert of("b", work(scheduler, 2)) == [(0, 128), (128, 72)]


def test_generated_tokens_are_computed_again_one_by_one():
    scheduler = make_scheduler(60, EAGER)
    request = make_request("a", 40, max_tokens=9, floor=2)
    scheduler.add(request)
    work(scheduler, 6)
    assert request.num_output_tokens == 5
    scheduler._preempt(request)
    assert of("a", work(scheduler, 6)) == [(32, 8), (40, 1), (41, 1), (42, 1), (43, 1), (44, 1)]
    assert request.num_output_tokens == 6


@pytest.mark.parametrize(("spec", "window"), [(EAGER, BLOCK), (AT_ONCE, 0)], ids=["recent", "at once"])
def test_a_token_sees_blocks_on_rungs_that_its_position_gives(spec, window):
    scheduler = make_scheduler(400, spec, budget=512)
    for name, number in (("a", 900), ("b", 500), ("c", 700), ("d", 40)):
        scheduler.add(make_request(name, [ord(name)] * number, max_tokens=300, floor=2))
    for _ in range(80):
        batch = scheduler.schedule()
        for item in batch.items:
            blocks = scheduler.space.tables.main[item.request.request_id].blocks
            aged = max(0, item.start - window - 32) // BLOCK
            assert [block.rung for block in blocks] == [2] * aged + [0] * (len(blocks) - aged)
        run(scheduler, batch)


def test_a_block_that_finds_no_room_breaks_the_step_off(monkeypatch):
    scheduler = make_scheduler(60, AT_ONCE)
    scheduler.add(make_request("a", 300, floor=2))
    work(scheduler, 2)
    monkeypatch.setattr(scheduler.space.tables.store, "_urgent_slot", lambda nbytes, wave: None)
    with pytest.raises(QKVError, match="no room to step down"):
        scheduler.schedule()


def test_blocks_of_prompts_alone_are_shared():
    scheduler = make_scheduler(60, DENSE)
    first = make_request("a", [1] * 200, max_tokens=200)
    scheduler.add(first)
    work(scheduler, 202)
    assert first.is_finished and len(scheduler.space.prefix) == 1
    second = make_request("b", first.token_ids, max_tokens=200)
    scheduler.add(second)
    found = work(scheduler, 60)
    assert second.num_cached_tokens == BLOCK and of("b", found)[:3] == [(128, 128), (256, 128), (384, 16)]


def test_generated_tokens_are_found_nowhere_when_they_are_computed_again():
    """Though another request has them in its prompt, where they were computed as a chunk."""
    scheduler = make_scheduler(60, DENSE)
    first = make_request("a", [1] * 130, max_tokens=200)
    scheduler.add(first)
    work(scheduler, 152)
    scheduler.add(make_request("b", [*first.token_ids, *[7] * 200], max_tokens=1))
    work(scheduler, 5)
    scheduler._preempt(first)
    work(scheduler, 1)
    assert first.num_computed_tokens == 130  # a block was found, and the prompt's rest computed


@pytest.mark.parametrize(
    ("rungs", "holders", "spec", "number"),
    [
        # Blocks behind the recent window on the floor, the others dense; all idle.
        ([2, 2, 0], [[], [], []], EAGER, 3),
        ([2, 0, 0], [[], [], []], EAGER, 2),
        ([2, 2, 2], [[], [], []], EAGER, 0),
        ([0, 0, 0], [[], [], []], EAGER, 1),
        ([2, 2, 2], [[], [], []], AT_ONCE, 3),
        ([2, 2, 0], [[], [], []], AT_ONCE, 2),
        ([2, 1, 2], [[], [], []], AT_ONCE, 1),
        # Held: on the floor by those with the same one, dense by nobody.
        ([2, 2, 0], [[2], [2], []], EAGER, 3),
        ([2, 2, 0], [[], [], [2]], EAGER, 0),
        ([2, 2, 2], [[2, 2], [2], [2]], AT_ONCE, 3),
    ],
    ids=lambda value: None,
)
def test_a_prefix_is_taken_as_far_as_it_is_what_the_request_would_have(rungs, holders, spec, number):
    scheduler = make_scheduler(60, spec)
    space, tokens = scheduler.space, [3] * (32 + 3 * BLOCK)
    space.tables.open("a", 2)
    assert space.tables.reserve("a", len(tokens))
    space.prefix.publish("a", tokens, "", len(tokens))
    blocks = list(space.tables.main["a"].blocks)
    space.tables.demote([(block, rung) for block, rung in zip(blocks, rungs, strict=True) if rung])
    space.tables.release("a")
    for block, floors in zip(blocks, holders, strict=True):
        block.holders = floors
    found = space.prefix.lookup([*tokens, *[4] * 300], "", 2, len(tokens), is_exact=True)
    assert found.num_tokens == 32 + number * BLOCK


def test_a_pinned_request_shares_dense_blocks_with_pinned_ones_alone():
    scheduler = make_scheduler(60, AT_ONCE)
    tokens, hits = [3] * (32 + 3 * BLOCK + 1), {}
    for name, floor in (("a", 0), ("b", 0), ("c", 2), ("d", 2), ("e", 0)):
        request = make_request(name, tokens, max_tokens=40, floor=floor)
        scheduler.add(request)
        work(scheduler, 6)
        hits[name] = request.num_cached_tokens
    assert hits == {"a": 0, "b": 416, "c": 32, "d": 32, "e": 416}
