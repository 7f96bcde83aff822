"""The store of responses: bounded in number and bytes, and fair to tenants."""

from __future__ import annotations

import random

from qkv_engine.serve.dialects.response_store import OVERHEAD, ResponseStore, StoredResponse


def stored(nbytes: int) -> StoredResponse:
    return StoredResponse(b"x" * (nbytes - OVERHEAD), b"")


def test_responses_are_their_tenant_s_alone():
    store = ResponseStore(10_000)
    store.put("alice", "1", stored(2000))
    assert store.get("alice", "1") is not None and store.get("bob", "1") is None and not store.delete("bob", "1")
    assert store.delete("alice", "1") and not store.delete("alice", "1") and store.nbytes == len(store) == 0


def test_who_has_most_makes_room():
    store = ResponseStore(10_000)
    store.put("small", "s", stored(3000))
    for number in range(9):
        store.put("greedy", str(number), stored(2000))
    assert store.get("small", "s") is not None
    assert [n for n in range(9) if store.get("greedy", str(n))] == [6, 7, 8]
    few = ResponseStore(1 << 20, max_number=4)
    few.put("small", "s", stored(9000))
    for number in range(9):
        few.put("greedy", str(number), stored(2000))
    assert len(few) == 4 and few.get("small", "s") is not None


def test_what_is_larger_than_all_room_takes_none():
    store = ResponseStore(10_000)
    store.put("alice", "1", stored(4000))
    store.put("alice", "2", stored(10_001))
    assert store.get("alice", "1") is not None and store.get("alice", "2") is None


def test_bounds_and_books_hold_whatever_comes():
    rng, store = random.Random(7), ResponseStore(50_000, max_number=12)
    for number in range(3000):
        tenant = rng.choice("abcde")
        if rng.random() < 0.7:
            store.put(tenant, str(number), stored(rng.randint(OVERHEAD, 20_000)))
        else:
            store.delete(tenant, str(rng.randrange(max(number, 1))))
        each = [response for found in store._stored.values() for response in found.values()]
        assert store.nbytes == sum(response.nbytes for response in each) <= 50_000
        assert len(store) == len(each) <= 12 and all(store._stored.values())
