"""The coldest blocks, found from those of each request, against all blocks in order."""

from __future__ import annotations

import random
from heapq import heapify, heappop, heappush

import pytest

from qkv_engine.kv.manager import KVManager
from qkv_engine.request import Request
from qkv_engine.scheduler.coldest import Candidate, Coldest, Tally, eligible, eligible_blocks
from qkv_engine.scheduler.queue import RequestQueue

from .common import BLOCK, RUNGS, make_request, make_space, make_spec


class AllInOrder:
    """A heap of all blocks that may step down."""

    def __init__(self, space: KVManager, running: RequestQueue, ranks: dict[Request, int]):
        self.heap = eligible(space, running, ranks)
        heapify(self.heap)

    def take(self, number: int) -> list[Candidate]:
        chosen = [heappop(self.heap) for _ in range(min(number, len(self.heap)))]
        for candidate in chosen:
            if candidate.rung + 1 < candidate.block.floor:
                heappush(self.heap, candidate.next())
        return chosen


def crowd(rng: random.Random) -> tuple[KVManager, RequestQueue]:
    """Requests of all lengths and floors, some of which begin with blocks of another, on rungs of all kinds."""
    space = make_space(2000, make_spec(RUNGS, recent=rng.choice((0, 50))), slab_blocks=4)
    running = RequestQueue()
    for arrival in range(rng.choice((3, 12, 40))):
        request = make_request(f"r{arrival}", 1, floor=rng.choice((2, 2, 1, 0)))
        request.arrival, request.num_computed_tokens = arrival, rng.randint(1, 6 * BLOCK)
        shared = list(space.tables.main[rng.choice(list(running)).request_id]) if running and rng.random() < 0.3 else []
        floor = request.floor
        own = shared[: rng.randint(0, request.num_computed_tokens // BLOCK)]
        space.tables.open(request.request_id, floor, own if all(block.rung <= floor for block in own) else ())
        assert space.reserve(request, request.num_computed_tokens)
        running.add(request)
        for block in space.tables.main[request.request_id]:
            if block.rung < block.floor and rng.random() < 0.5:
                assert space.demote([(block, rng.randint(block.rung + 1, block.floor))])
    return space, running


@pytest.mark.parametrize("seed", range(60))
def test_the_coldest_are_the_first_of_all_in_order(seed: int):
    rng = random.Random(seed)
    space, running = crowd(rng)
    ranks = {request: rng.choice((0, 1, 1)) for request in space.aged(running) if rng.random() < 0.9}
    some, every = Coldest(space, running, ranks), AllInOrder(space, running, ranks)
    while True:
        number = rng.choice((1, 1, 2, 8))
        found, expected = some.take(number), every.take(number)
        assert [(c.block, c.rung, c.rank) for c in found] == [(c.block, c.rung, c.rank) for c in expected]
        if not found:
            break
        assert space.demote([(candidate.block, candidate.rung + 1) for candidate in found]) == len(found)
    assert all(block.is_shared for block, age in ((b, a) for r in ranks for b, a in space.unsettled(r)) if age >= 0)


@pytest.mark.parametrize("seed", range(60))
def test_a_tally_that_is_kept_is_one_made_anew(seed: int):
    """Blocks step down, and requests begin on blocks of others, one of which holds all and one that ended held."""
    rng = random.Random(seed)
    space, running = crowd(rng)
    made = space.tables.main[running.last.request_id].blocks
    for block in made:
        block.refs += 1  # as the prefix cache does, so that they outlive their request
    space.tables.release(running.last.request_id)
    running.remove(running.last)

    def tally() -> Tally:
        return Tally(eligible_blocks(space, running, dict.fromkeys(space.aged(running), 0)))

    kept = tally()
    for arrival in range(100, 120):
        found = Coldest(space, running, dict.fromkeys(space.aged(running), 0)).take(rng.choice((0, 1, 8)))
        space.demote([(candidate.block, candidate.rung + 1) for candidate in found])
        kept.stepped_down(candidate.block for candidate in found)
        request = make_request(f"r{arrival}", 1, floor=rng.choice((2, 2, 1, 0)))
        request.arrival = arrival
        own = rng.choice([made, *(space.tables.main[r.request_id].blocks for r in running)])
        own = own[: rng.randint(0, len(own))]
        if all(block.rung <= request.floor for block in own):
            request.num_computed_tokens = len(own) * BLOCK
            space.tables.open(request.request_id, request.floor, own)
            running.add(request)
            kept.joined(space, request)
        assert sorted(kept.items()) == sorted(tally().items())


def test_of_most_requests_only_the_coldest_block_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    space, running = crowd(random.Random(2))
    found = Coldest(space, running, dict.fromkeys(space.aged(running), 0))
    looked_at = []
    monkeypatch.setattr(space, "unsettled", lambda request: looked_at.append(request) or iter(()))
    (chosen,) = found.take(1)
    assert looked_at == [chosen.request]
