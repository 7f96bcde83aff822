"""The prefix cache with windows: hits that the groups can serve together, and what is given up first."""

from __future__ import annotations

from qkv_engine.kv.hits import Hit
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.spec import KVSpec

from ...scheduler.common import BLOCK, RUNGS, make_group_spec, make_request, make_space, make_spec

TOKENS = list(range(1000))


def space_of(visible: int | None, *, recent: int = 0, sink: int = 0) -> KVManager:
    """A group that sees all, and one with a window or another one that sees all."""
    window = make_group_spec(RUNGS[:2], visible=visible, recent=recent, sink=sink, sink_nbytes=2)
    return make_space(90, make_spec(RUNGS[:2], sink=sink, sink_nbytes=2, more_groups=(window,)), prefix=True)


def computed(space: KVManager, name: str, num_tokens: int, *, steps: int = 1) -> None:
    """A request whose tokens were computed in so many chunks."""
    request = make_request(name, TOKENS[:num_tokens], floor=1)
    request.num_computed_tokens = space.open(request)
    for step in range(steps):
        space.trim(request)
        end = max(request.num_computed_tokens, num_tokens * (step + 1) // steps)
        assert space.reserve(request, end)
        request.num_computed_tokens = end
        space.computed(request, end)
    space.trim(request)
    space.release(request)


def hit(space: KVManager, num_tokens: int) -> Hit:
    return space.prefix.lookup(TOKENS[:num_tokens], "", 1, num_tokens - 1)


def test_a_hit_takes_the_blocks_in_sight_and_all_of_a_group_that_sees_all():
    space = space_of(BLOCK + 1)
    computed(space, "a", 5 * BLOCK)
    found = hit(space, 4 * BLOCK + 1)
    assert found.num_tokens == 4 * BLOCK and [block.group for block in found.blocks] == [0] * 4 + [1]
    request = make_request("b", TOKENS[: 4 * BLOCK + 1], floor=1)
    assert space.open(request) == 4 * BLOCK == request.num_reserved_tokens
    full, window = space.tables.of("b")
    assert (full.first, len(full.blocks), window.first, len(window.blocks)) == (0, 4, 3, 1)
    assert request.next_passed_at == 5 * BLOCK
    space.tables.check_integrity()


def test_a_sink_in_sight_is_part_of_a_hit_and_one_out_of_sight_is_not():
    space = space_of(BLOCK, sink=32)
    computed(space, "a", 32 + 3 * BLOCK)
    assert [block.rung for block in hit(space, 33).blocks] == [-1, -1]
    assert [(block.group, block.rung) for block in hit(space, 33 + BLOCK).blocks] == [(0, -1), (0, 0), (1, 0)]


def test_a_hit_is_shorter_where_a_window_was_given_back_before_it_was_filed():
    """Computed in one chunk and filed after the next was scheduled: only its last window is there."""
    space = space_of(BLOCK)
    request = make_request("a", TOKENS[: 5 * BLOCK], floor=1)
    space.open(request)
    assert space.reserve(request, 4 * BLOCK)
    request.num_computed_tokens = 4 * BLOCK
    space.trim(request)
    space.computed(request, 4 * BLOCK)
    entries = space.prefix._entries.values()
    assert [[block is None for block in entry.blocks] for entry in entries] == [[False, True]] * 3 + [[False, False]]
    assert [hit(space, n * BLOCK + 1).num_tokens for n in range(1, 6)] == [0, 0, 0, 4 * BLOCK, 4 * BLOCK]
    computed(space, "b", 3 * BLOCK)  # computes them again, and files what is missing
    assert [hit(space, n * BLOCK + 1).num_tokens // BLOCK for n in range(1, 6)] == [1, 2, 3, 4, 4]


def test_a_narrow_block_is_shared_in_a_window_where_it_is_older_than_the_recent_one():
    space = space_of(3 * BLOCK, recent=BLOCK)
    computed(space, "a", 5 * BLOCK)
    blocks = [entry.blocks[1] for entry in space.prefix._entries.values()]
    space.demote([(blocks[2], 1)])
    # Of a hit of n blocks the last one is recent, those before it are not.
    assert [hit(space, n * BLOCK + 1).num_tokens // BLOCK for n in range(1, 6)] == [1, 2, 2, 4, 5]
    space.demote([(blocks[4], 1)])
    assert hit(space, 5 * BLOCK + 1).num_tokens == 4 * BLOCK
    pinned = space.prefix.lookup(TOKENS[: 5 * BLOCK], "", 0, 5 * BLOCK - 1)
    assert pinned.num_tokens == 2 * BLOCK


def test_blocks_in_a_window_are_given_up_one_by_one_and_others_with_all_of_their_tokens():
    space = space_of(BLOCK)
    computed(space, "a", 3 * BLOCK)
    prefix, used = space.prefix, space.tables.arena.used_nbytes

    def left() -> list[list[bool]]:
        return [[block is not None for block in entry.blocks] for entry in prefix._entries.values()]

    assert prefix.evict() and left() == [[True, False], [True, True], [True, True]]
    assert space.tables.arena.used_nbytes == used - 16
    computed(space, "b", 3 * BLOCK)  # uses the blocks of two, and computes the last anew
    assert prefix.evict() and left() == [[True, False], [True, False], [True, True]]  # b had passed the second one
    assert prefix.evict() and left() == [[True, False], [True, False]]
    assert prefix.evict() and prefix.evict() and not len(prefix) and not prefix.evict()
    assert space.tables.arena.used_nbytes == 0 == prefix.idle.nbytes


def test_groups_that_see_all_are_given_up_together():
    space = space_of(None)
    computed(space, "a", 2 * BLOCK)
    assert len(space.prefix) == 2 and space.prefix.idle.nbytes == 4 * 16
    assert space.prefix.evict() and space.tables.arena.used_nbytes == 2 * 16
    assert hit(space, 3 * BLOCK).num_tokens == BLOCK
    space.prefix.purge([next(iter(space.prefix._of_block))])
    assert space.tables.arena.used_nbytes == 0


def test_windows_alone_find_the_last_window():
    spec = KVSpec("tiny", (make_group_spec(RUNGS[:1], visible=BLOCK),), False, 0)
    space = make_space(20, spec, prefix=True)
    request = make_request("a", TOKENS[: 4 * BLOCK], floor=0)
    space.open(request)
    assert space.reserve(request, 4 * BLOCK)
    request.num_computed_tokens = 3 * BLOCK
    space.trim(request)
    space.computed(request, 3 * BLOCK)
    space.release(request)
    assert len(space.prefix) == 1
    found = space.prefix.lookup(TOKENS, "", 0, 4 * BLOCK)
    assert (found.num_tokens, len(found.blocks)) == (3 * BLOCK, 1)
    assert space.prefix.evict() and not len(space.prefix) and space.tables.arena.used_nbytes == 0
