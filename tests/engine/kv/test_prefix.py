"""The prefix cache: what is filed, found, given up and taken out."""

from __future__ import annotations

from array import array

import pytest

from qkv_engine.kv import prefix as prefix_module
from qkv_engine.kv.hits import Hit

from ...scheduler.common import BLOCK, DENSE, LADDER, RUNGS, make_request, make_space, make_spec

SINK = make_spec(RUNGS, sink=32, sink_nbytes=4)


def filed(space, name: str, tokens: list[int], salt: str = "", floor: int = 2):
    """A request that computed all its tokens; returns its table."""
    floor = min(floor, space.num_rungs - 1)
    space.tables.open(name, floor, space.prefix.lookup(tokens, salt, floor, len(tokens) - 1).blocks)
    assert space.tables.reserve(name, len(tokens))
    space.prefix.publish(name, tokens, salt, len(tokens))
    return space.tables.main[name]


def gone(space, name: str) -> None:
    space.tables.release(name)
    space.prefix.forget(name)


def test_full_blocks_are_filed_and_found_by_their_tokens():
    space = make_space(8, DENSE, prefix=True)
    table = filed(space, "a", [1] * (2 * BLOCK + 5))
    assert len(space.prefix) == 2 and [block.refs for block in table.blocks] == [2, 2, 1]
    find = space.prefix.lookup
    assert find([1] * (2 * BLOCK + 1), "", 0, 2 * BLOCK) == Hit(2 * BLOCK, table.blocks[:2])
    assert find([1] * (2 * BLOCK + 1), "", 0, 2 * BLOCK - 1) == Hit(BLOCK, table.blocks[:1])  # one token is left
    assert find([1] * BLOCK + [2] * BLOCK, "", 0, 2 * BLOCK) == Hit(BLOCK, table.blocks[:1])
    assert find([2] + [1] * 2 * BLOCK, "", 0, 2 * BLOCK) == Hit()
    assert (space.prefix.num_queried_tokens, space.prefix.num_hit_tokens) == (2 * BLOCK + 4 + 8 * BLOCK - 1, 4 * BLOCK)


def test_salts_do_not_share():
    space = make_space(8, DENSE, prefix=True)
    table = filed(space, "a", [1] * 2 * BLOCK, salt="alice")
    assert space.prefix.lookup([1] * 2 * BLOCK, "bob", 0, 2 * BLOCK) == Hit()
    assert space.prefix.lookup([1] * 2 * BLOCK, "alice", 0, 2 * BLOCK) == Hit(2 * BLOCK, table.blocks)


def test_the_sink_is_the_first_piece():
    space = make_space(12, SINK, prefix=True)
    table = filed(space, "a", [1] * (32 + BLOCK + 3))
    found = space.prefix.lookup([1] * 400, "", 2, 399).blocks
    assert found == [*table.slots, table.blocks[0]]
    assert space.prefix.lookup([1] * 31, "", 2, 31) == Hit()
    assert space.prefix.lookup([1] * 33, "", 2, 32) == Hit(32, table.slots)


def test_tokens_are_compared_so_that_a_collision_mixes_nobody(monkeypatch):
    monkeypatch.setattr(prefix_module, "_extend", lambda key, tokens: bytes(32))
    space = make_space(8, DENSE, prefix=True)
    filed(space, "a", [1] * BLOCK)
    assert space.prefix.lookup([2] * BLOCK, "", 0, BLOCK) == Hit()


def test_a_hit_is_never_narrower_than_the_floor():
    space = make_space(12, LADDER, prefix=True)
    table = filed(space, "a", [1] * 3 * BLOCK)
    space.tables.demote([(table.blocks[0], 1), (table.blocks[1], 2)])
    lookup = space.prefix.lookup
    assert [len(lookup([1] * 400, "", floor, 399).blocks) for floor in (0, 1, 2)] == [0, 1, 3]


def test_the_least_recently_used_leaf_is_given_up_first():
    space = make_space(8, DENSE, prefix=True)
    for name, token in (("a", 1), ("b", 2)):
        filed(space, name, [token] * 2 * BLOCK)
        gone(space, name)
    assert space.prefix.idle.nbytes == 4 * 16
    space.tables.open("c", 0, space.prefix.lookup([1] * 300, "", 0, 299).blocks)
    gone(space, "c")  # used a's blocks after b's were let go
    assert space.prefix.evict() and len(space.prefix.lookup([2] * 300, "", 0, 299).blocks) == 1  # its second block went
    assert space.prefix.evict() and space.prefix.evict() and space.prefix.evict()
    assert not space.prefix.evict() and space.tables.arena.used_nbytes == 0


def test_hits_without_end_leave_nothing_behind():
    space = make_space(8, DENSE, prefix=True)
    for serial in range(500):
        filed(space, f"r{serial}", [1] * 3 * BLOCK)
        gone(space, f"r{serial}")
    assert len(space.prefix) == 3 and len(space.prefix.idle._exits) < 100
    assert [space.prefix.evict() for _ in range(4)] == [True, True, True, False]


def test_a_block_before_one_in_use_is_given_up_when_nothing_else_is_idle():
    space = make_space(8, DENSE, prefix=True)
    tokens = [1] * 2 * BLOCK
    for name in "ab":  # computed beside each other: each has its own first block, a's is filed
        space.tables.open(name, 0)
        assert space.tables.reserve(name, 2 * BLOCK)
    space.prefix.publish("a", tokens, "", BLOCK)
    space.prefix.publish("b", tokens, "", 2 * BLOCK)  # b's second block follows a's first
    gone(space, "a")
    assert space.prefix.idle.nbytes == 16
    assert space.prefix.evict() and not space.prefix.evict()
    assert space.prefix.lookup([*tokens, 1], "", 0, 2 * BLOCK) == Hit()
    gone(space, "b")
    assert space.prefix.evict() and space.tables.arena.used_nbytes == 0


def test_what_is_not_to_be_trusted_is_taken_out():
    space = make_space(8, DENSE, prefix=True)
    table = filed(space, "a", [1] * 3 * BLOCK)
    space.prefix.purge(table.blocks[1:2])
    assert space.prefix.lookup([1] * 400, "", 0, 399) == Hit(BLOCK, table.blocks[:1])
    assert [block.refs for block in table.blocks] == [2, 1, 2]
    space.prefix.clear()
    assert [block.refs for block in table.blocks] == [1, 1, 1]
    space.tables.check_integrity()


def test_a_recomputed_request_files_its_new_blocks():
    space = make_space(8, DENSE, prefix=True)
    filed(space, "a", [1] * 2 * BLOCK)
    gone(space, "a")
    space.prefix.clear()
    table = filed(space, "a", [1] * 2 * BLOCK)
    assert space.prefix.lookup([1] * 300, "", 0, 299) == Hit(2 * BLOCK, table.blocks)


def test_the_next_block_is_full_at_its_end_and_not_before():
    for ladder in (DENSE, SINK):
        prefix = make_space(4, ladder, prefix=True).prefix
        for num_tokens in range(3 * BLOCK):
            end = prefix.next_end(num_tokens)
            pieces = [prefix._num_pieces(n) for n in (num_tokens, end - 1, end)]
            assert num_tokens < end and pieces == [pieces[0], pieces[0], pieces[0] + 1]


def test_a_hit_that_would_lie_in_the_recent_window_has_to_be_dense():
    space = make_space(20, make_spec(RUNGS, recent=BLOCK), prefix=True)
    table = filed(space, "a", [1] * 5 * BLOCK)
    space.demote([(block, 1) for block in table.blocks[:4]])

    def hits(num_tokens: int, floor: int = 2) -> int:
        return len(space.prefix.lookup([1] * num_tokens, "", floor, num_tokens - 1).blocks)

    assert hits(5 * BLOCK) == 3  # its last block begins at 512, when 384 tokens are older than the window
    assert hits(5 * BLOCK + 1) == 5  # the fifth lies in the window, and is dense
    assert space.prefix.num_hit_tokens == 8 * BLOCK
    space.demote([(table.blocks[4], 1)])
    assert (hits(5 * BLOCK + 1), hits(6 * BLOCK + 1), hits(6 * BLOCK + 1, floor=0)) == (4, 5, 0)


def test_pieces_of_a_request_are_hashed_once(monkeypatch: pytest.MonkeyPatch):
    space, hashed = make_space(8, DENSE, prefix=True), list[int]()
    extend = prefix_module._extend

    def noted(key: bytes, tokens: array[int]) -> bytes:
        hashed.append(len(tokens))
        return extend(key, tokens)

    monkeypatch.setattr(prefix_module, "_extend", noted)
    request = make_request("a", [1] * 400, floor=0)
    request.num_computed_tokens = space.open(request)
    assert space.reserve(request, 400)
    for number in (BLOCK, 300, 400):
        space.computed(request, number)
    known = space.prefix.pieces([1] * 400, "", 400)
    assert request.pieces == known and hashed == [BLOCK] * 6
    assert [piece.parent for piece in known[1:]] == [piece.key for piece in known[:-1]]
    assert space.prefix.pieces([1] * 400, "", 399, request.pieces) == known and len(hashed) == 6
