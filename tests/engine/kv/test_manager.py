"""KV memory as the scheduler sees it: capacity and admission in numbers, usage."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from qkv_engine.kv.spec import RungSize
from qkv_engine.request import KVUsage, Request, SamplingParams

from ...scheduler.common import BLOCK, DENSE, LADDER, RUNGS, make_request, make_space, make_spec


def test_capacity_is_that_of_the_floor():
    space = make_space(8, LADDER)  # six slabs without the reserve
    assert space.capacities == (6 * BLOCK, (1 + 5 * 2) * BLOCK, (1 + 5 * 4) * BLOCK)
    odd = make_spec((RungSize("dense16", 16, 16.0), RungSize("odd", 9, 8.0)))
    # Slabs of 48 bytes hold three dense blocks or five odd ones.
    assert make_space(12, odd, slab_blocks=3).capacities[1] == (3 + 2 * 5) * BLOCK - 2 * BLOCK


def test_admission_counts_everybody_on_their_floors_with_what_they_may_still_write():
    space, running = make_space(6, LADDER), make_request("a", BLOCK, max_tokens=1)  # four slabs
    space.open(running)
    assert space.admits(make_request("b", BLOCK, max_tokens=2 * BLOCK + 1))  # 2 open, 2 at four bits
    assert space.admits(make_request("b", BLOCK, max_tokens=4 * BLOCK + 1))
    assert not space.admits(make_request("b", BLOCK, max_tokens=8 * BLOCK + 2))
    assert not space.admits(make_request("b", BLOCK, max_tokens=3 * BLOCK, floor=0))
    space.release(running)
    assert space.admits(make_request("b", BLOCK, max_tokens=99 * BLOCK))  # alone: refused at submit or it fits


def test_admission_counts_the_slab_that_a_block_begins_when_it_steps_down():
    two = make_spec(RUNGS[:2])
    for slab_blocks, fits in ((1, True), (2, False)):
        # Six open blocks fill the arena. One of them full and stepped down: five dense ones and a slab for one narrow.
        space = make_space(6 + slab_blocks, two, slab_blocks=slab_blocks)
        running = [make_request(f"r{i}", BLOCK, max_tokens=1, floor=1) for i in range(5)]
        for request in running:
            space.open(request)
        assert space.admits(make_request("last", BLOCK, max_tokens=1, floor=1)) == fits
        space.release(running[0])
        assert space.admits(make_request("last", BLOCK, max_tokens=1, floor=1))


def test_an_open_end_is_counted_as_a_usual_answer():
    space, request = make_space(12, DENSE), Request("a", [1] * BLOCK, SamplingParams(), 10_000, floor=0)
    usual = (BLOCK + space.demand.open_end_tokens) // BLOCK
    space.open(request)
    assert space.demand.total.slots(0) == {16: usual}
    seen = []
    for step in range(1, 2 * BLOCK + 2):
        request.num_tokens += 1
        space.begin_admission(step)
        seen.append(space.demand.total.slots(0)[16])
    assert seen == [usual + 1] * BLOCK + [usual + 2] * BLOCK + [usual + 3]
    space.release(request)
    assert not space.demand and space.demand.total.slots(0) == {16: 0}


def test_a_hit_leaves_a_token_to_compute_and_prompt_logprobs_need_them_all():
    space = make_space(12, DENSE, prefix=True)
    first = make_request("a", [1] * 2 * BLOCK, floor=0)
    assert space.open(first) == 0 and space.reserve(first, 2 * BLOCK)
    space.computed(first, 2 * BLOCK)
    assert space.open(make_request("b", [1] * 2 * BLOCK, floor=0)) == BLOCK
    assert space.open(make_request("c", [1] * (2 * BLOCK + 1), floor=0)) == 2 * BLOCK
    assert space.open(make_request("d", [1] * (2 * BLOCK + 1), prompt_logprobs=1, floor=0)) == 0


def test_what_a_failed_request_filed_is_not_offered():
    space = make_space(12, DENSE, prefix=True)
    for name, end in (("good", space.release), ("bad", space.discard)):
        request = make_request(name, [len(name)] * BLOCK, floor=0)
        assert space.open(request) == 0 and space.reserve(request, BLOCK)
        space.computed(request, BLOCK)
        end(request)
    assert space.open(make_request("x", [4] * 300, floor=0)) == BLOCK
    assert space.open(make_request("y", [3] * 300, floor=0)) == 0


def test_usage_names_rungs_and_the_fewest_bits():
    space = make_space(12, make_spec(RUNGS, sink=32, sink_nbytes=4))
    request = make_request("a", 32 + 3 * BLOCK)
    assert space.usage(request) == KVUsage()
    space.open(request)
    assert space.reserve(request, 10) and space.usage(request) == KVUsage({}, 16.0)  # a sink alone
    assert space.reserve(request, 32 + 3 * BLOCK)
    blocks = space.tables.main["a"].blocks
    space.demote([(blocks[0], 2), (blocks[1], 1)])
    assert space.usage(request) == KVUsage({"dense16": 1, "int8": 1, "int4": 1}, 4.0)
    assert space.nbytes(request) == 4 + 4 + 8 + 16


def test_bytes_of_shared_blocks_are_divided_among_requests_not_with_the_cache():
    space = make_space(12, DENSE, prefix=True)
    for name in "ab":
        request = make_request(name, [1] * (BLOCK + 1), floor=0)
        space.open(request)
        assert space.reserve(request, BLOCK + 1)
        space.computed(request, BLOCK + 1)
    assert space.nbytes(request) == 16 // 2 + 16


def test_quotas_bound_a_tenant_but_never_its_only_request():
    space = make_space(10, DENSE, quota=0.5)
    assert space.capacities[0] == 5 * BLOCK
    one, two = (make_request(name, 3 * BLOCK, max_tokens=1, tenant="t", floor=0) for name in "ab")
    assert space.within_quota(one)
    space.open(one)
    assert not space.within_quota(two)
    assert space.within_quota(make_request("c", 2 * BLOCK, max_tokens=1, tenant="t", floor=0))
    assert space.within_quota(make_request("d", 3 * BLOCK, max_tokens=1, tenant="other", floor=0))
    space.release(one)
    assert space.within_quota(two)
    assert space.over_quota(81) and not space.over_quota(80)
    assert not make_space(10, DENSE).over_quota(2**62)


@pytest.mark.parametrize("seed", range(4))
def test_aged_are_those_with_a_block_past_the_window_at_every_token(seed: int):
    """Requests that share a block and step down now and then; one leaves, so that the others' may go further down."""
    rng, floors = random.Random(seed), {"a": 2, "b": 2, "c": 1}
    ladder = make_spec(RUNGS, sink=4 * (seed % 2), recent=50, recent_ratio=Fraction(seed, 10), sink_nbytes=16)
    space = make_space(64, ladder)
    running = [make_request(name, BLOCK, floor=floor) for name, floor in floors.items()]
    space.open(running[0])
    assert space.reserve(running[0], BLOCK)
    for request in running[1:]:
        space.tables.open(request.request_id, request.floor, space.tables.main["a"])
    found = 0
    for step in range(3 * BLOCK):
        for request in running:
            request.num_computed_tokens += rng.randint(0, 2)
            assert space.reserve(request, request.num_computed_tokens)
        old = {r: [block for block, age in space.unsettled(r) if age >= 0] for r in running}
        expected = [request for request in running if old[request]]
        assert space.aged(running) == expected
        found += len(expected)
        if expected and rng.random() < 0.1:
            block = old[expected[-1]][0]
            assert space.demote([(block, block.rung + 1)])
        if step == 2 * BLOCK:
            space.release(running.pop())
    assert found > 20 and space.tables.floor_epoch
