"""Checkpoints of states: where requests leave them, who begins on them, what they yield to, on tiny pools."""

from __future__ import annotations

import pytest

from qkv_engine.kv.block import Move
from qkv_engine.kv.borders import Borders
from qkv_engine.kv.moves import take_moves
from qkv_engine.kv.spec import GroupSpec, KVSpec, RequestSlot
from qkv_engine.request import FinishReason, Request
from qkv_engine.scheduler import ScheduledBatch, Scheduler

from .common import BLOCK, RUNGS, make_group_spec, make_request, make_scheduler, make_spec, run, shape

DENSE = RUNGS[:1]


def make_states(*sizes: int) -> tuple[RequestSlot, ...]:
    return tuple(RequestSlot("state", 0, nbytes, 0, True) for nbytes in sizes)


HYBRID = make_spec(DENSE, others=make_states(4, 4))
CONCURRENT = {"first": {}, "own": {"prompt_logprobs": 1}}  # the second one takes up nothing of the first
LARGE = make_spec(DENSE, others=make_states(16, 16, 8))  # a checkpoint every 3 blocks


def ids(salt: int, num_tokens: int) -> list[int]:
    return [salt * 10_000 + i for i in range(num_tokens)]


def go(scheduler: Scheduler, steps: int = 1) -> list[list[tuple[str, int, int]]]:
    """The shapes of some steps."""
    batches = list[ScheduledBatch]()
    for _ in range(steps):
        batches.append(scheduler.schedule())
        run(scheduler, batches[-1])
    scheduler.space.tables.check_integrity()
    return [shape(batch) for batch in batches]


def finished(scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int = 1) -> Request:
    """A request that runs alone until it has ended."""
    request = make_request(name, prompt, max_tokens, floor=0, ignore_eos=True)
    scheduler.add(request)
    while not request.is_finished:
        go(scheduler)
    return request


def borders(scheduler: Scheduler, tokens: list[int], salt: str = "") -> list[int]:
    """Ends of the first tokens of which there are checkpoints."""
    prefix = scheduler.space.prefix
    keys = [key for key, _, _ in prefix.pieces(tokens, salt, len(tokens))]
    sink = scheduler.space.spec.sink
    return [sink + BLOCK * (i + (sink == 0)) for i, key in enumerate(keys) if key in prefix.checkpoints]


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "expected"),
    [
        (1, 0, [128, 256, 384]),
        (128, 0, [128, 256, 384]),  # its last token is computed alone: no border before it
        (129, 0, [128, 256, 384]),
        (700, 0, [384, 640, 768, 896]),
        (700, 256, [256, 384, 640, 768]),
        (1300, 0, [384, 768, 1152, 1280, 1408]),
    ],
)
def test_borders_of_a_prompt_and_behind_it(num_tokens: int, num_cached: int, expected: list[int]):
    found, at = Borders.of(LARGE.main, 3, num_tokens, num_cached), [0]
    for _ in expected:
        at.append(found.after(at[-1]))
    assert at[1:] == expected


def test_a_sink_alone_is_no_border():
    group = make_group_spec(DENSE, sink=32, sink_nbytes=4, others=make_states(4))
    assert [Borders.of(group, 1, n, 32).after(0) for n in (33, 160, 161)] == [160, 160, 160]
    assert Borders.of(group, 1, 33, 32).last == 0 and Borders.of(group, 1, 161, 32).last == 160


def test_checkpoints_come_as_often_as_blocks_take_as_many_bytes():
    assert [make_scheduler(9, spec, prefix=True).space.prefix.checkpoints.every for spec in (HYBRID, LARGE)] == [1, 3]


def test_a_chunk_ends_at_a_border_and_the_copy_stands_before_the_next_step():
    scheduler = make_scheduler(12, HYBRID, prefix=True)
    scheduler.add(make_request("a", ids(1, 300), floor=0))
    assert go(scheduler) == [[("a", 0, 128)]] and not len(scheduler.space.prefix.checkpoints)
    batch = scheduler.schedule()
    assert shape(batch) == [("a", 128, 128)]
    command, lost = take_moves(scheduler.space.tables)
    states = [slot.slot for slot in scheduler.space.tables.main["a"].slots]
    (wave,) = command.waves
    (launch,) = wave.launches  # both states in one
    assert launch.src == [slot.address for slot in states] and launch.nbytes == 4 and launch.old == launch.new
    key = next(key for key, _, _ in scheduler.space.prefix.pieces(ids(1, 300), "", 300))
    assert launch.dst == [slot.slot.address for slot in scheduler.space.prefix.checkpoints[key].slots]
    assert not lost and not {address for address, _ in command.fresh} & {*launch.dst}


def test_a_hit_ends_at_a_checkpoint_and_is_copied_to_states_of_its_own():
    scheduler = make_scheduler(20, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    assert borders(scheduler, ids(1, 300)) == [128, 256]
    scheduler.add(make_request("b", ids(1, 290), floor=0))
    batch = scheduler.schedule()
    assert shape(batch) == [("b", 256, 34)]
    (wave,), checkpoints = scheduler.space.tables.store.waves, scheduler.space.prefix.checkpoints
    keys = [key for key, _, _ in scheduler.space.prefix.pieces(ids(1, 300), "", 300)]
    own, kept = scheduler.space.tables.main["b"].slots, checkpoints[keys[1]].slots
    assert [(move.src, move.dst) for move in wave] == [
        (a.slot.address, b.slot.address) for a, b in zip(kept, own, strict=True)
    ]
    assert not set(own) & set(kept) and all(slot.refs == 1 for slot in kept) and checkpoints.num_hits == 1


def test_blocks_without_a_checkpoint_are_computed_again():
    scheduler = make_scheduler(20, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    prefix = scheduler.space.prefix
    prefix.checkpoints.lose(list(prefix.checkpoints)[-1])
    again = finished(scheduler, "b", ids(1, 300))
    assert again.num_cached_tokens == 128 and borders(scheduler, ids(1, 300)) == [128, 256]


def test_a_beginning_that_comes_twice_gets_a_checkpoint_where_it_ends():
    """Two prompts part behind 256 tokens: the third one that begins so has them for nothing."""
    scheduler = make_scheduler(80, LARGE, prefix=True)
    shared = ids(1, 256)
    found = [finished(scheduler, f"r{i}", shared + ids(i + 2, 300)).num_cached_tokens for i in range(4)]
    assert found == [0, 0, 256, 256]
    assert borders(scheduler, shared + ids(3, 300)) == [256, 384, 512]


def test_behind_its_prompt_a_request_keeps_the_newest_alone():
    scheduler = make_scheduler(20, HYBRID, prefix=True)
    request = finished(scheduler, "a", ids(1, 100), 400)
    assert borders(scheduler, request.token_ids) == [384]
    assert scheduler.space.prefix.checkpoints.num_taken == 3 and len(scheduler.space.prefix.checkpoints) == 1
    turn = finished(scheduler, "b", request.token_ids + ids(2, 50))
    assert turn.num_cached_tokens == 384


def test_the_checkpoint_at_the_end_of_the_prompt_stays():
    scheduler = make_scheduler(30, HYBRID, prefix=True)
    request = finished(scheduler, "a", ids(1, 300), 250)
    assert borders(scheduler, request.token_ids) == [128, 256, 512]


def test_a_checkpoint_of_blocks_that_are_never_filed_goes_with_its_request():
    """It ends while the step that computed them is under way."""
    scheduler = make_scheduler(30, HYBRID, prefix=True)
    request = make_request("a", ids(1, 300), floor=0)
    scheduler.add(request)
    for _ in range(2):  # the second one is scheduled a step ahead
        scheduler.schedule()
    assert len(scheduler.space.prefix.checkpoints) == 1
    scheduler.finish(request, FinishReason.ABORT)
    assert not len(scheduler.space.prefix.checkpoints) and scheduler.space.tables.arena.used_nbytes == 0


def test_salts_separate_checkpoints():
    scheduler = make_scheduler(20, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    other = make_request("b", ids(1, 300), 1, floor=0, cache_salt="x")
    scheduler.add(other)
    go(scheduler, 3)
    assert other.num_cached_tokens == 0 and len(scheduler.space.prefix.checkpoints) == 4


def test_what_was_used_least_recently_is_given_up_a_checkpoint_before_its_blocks():
    scheduler = make_scheduler(30, HYBRID, prefix=True)
    for salt in (1, 2):
        finished(scheduler, f"r{salt}", ids(salt, 300))
    prefix, order = scheduler.space.prefix, []
    while prefix.evict():
        order.append([(len(borders(scheduler, ids(salt, 300))), held(scheduler, salt)) for salt in (1, 2)])
    first = [(1, 2), (0, 2), (0, 1), (0, 0)]  # checkpoints and blocks
    assert order == [[each, (2, 2)] for each in first] + [[(0, 0), each] for each in first]
    assert scheduler.space.tables.arena.used_nbytes == 0


def held(scheduler: Scheduler, salt: int) -> int:
    """Cached blocks of a prompt."""
    prefix = scheduler.space.prefix
    return sum(any(prefix.cached(key, piece)) for key, _, piece in prefix.pieces(ids(salt, 300), "", 300))


def test_a_request_that_needs_all_memory_gives_up_its_own_checkpoints():
    scheduler = make_scheduler(4, make_spec(DENSE, others=make_states(16)), prefix=True)
    request = finished(scheduler, "a", ids(1, 300), 40)
    assert request.finish_reason is FinishReason.LENGTH and not request.num_preemptions
    assert scheduler.space.prefix.checkpoints.num_taken and borders(scheduler, ids(1, 300)) == []


def test_idle_blocks_step_down_and_are_given_up_for_a_checkpoint():
    spec = make_spec(RUNGS, others=make_states(16))
    scheduler = make_scheduler(8, spec, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    before = scheduler.space.prefix.checkpoints.num_taken
    finished(scheduler, "b", ids(2, 500))
    store = scheduler.space.tables.store
    assert scheduler.space.prefix.checkpoints.num_taken > before and store.num_idle_demotions.total() > 0
    assert not store.num_demotions and borders(scheduler, ids(2, 500))


def test_nothing_yields_to_a_checkpoint_that_finds_no_room_even_so(monkeypatch: pytest.MonkeyPatch):
    scheduler = make_scheduler(5, make_spec(DENSE, others=make_states(16, 16)), prefix=True)
    space, cached = scheduler.space, list[int]()
    finished(scheduler, "a", ids(1, 129))
    keep_state = space.keep_state
    monkeypatch.setattr(space, "keep_state", lambda request: (cached.append(held(scheduler, 1)), keep_state(request)))
    scheduler.add(make_request("b", ids(2, 330), floor=0))
    go(scheduler, 2)
    assert cached == [1] and borders(scheduler, ids(2, 330)) == []  # it wants two slots beside four; one is idle


def test_a_running_request_has_checkpoints_given_up_before_it_pays():
    scheduler = make_scheduler(8, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    request = finished(scheduler, "b", ids(2, 700), 8)
    assert request.finish_reason is FinishReason.LENGTH and not request.num_preemptions
    assert borders(scheduler, ids(1, 300)) == []


def test_a_start_that_finds_no_room_lets_go_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch):
    scheduler = make_scheduler(9, make_spec(DENSE, others=make_states(16)), prefix=True)
    finished(scheduler, "a", ids(1, 300))
    monkeypatch.setattr(scheduler.space, "admits", lambda request: True)
    scheduler.add(make_request("long", ids(2, 500), 100, floor=0, num_prefill_tokens=500))
    go(scheduler)
    checkpoints = scheduler.space.prefix.checkpoints
    kept, started = list(checkpoints._found.values()), []
    begin = checkpoints.begin
    monkeypatch.setattr(checkpoints, "begin", lambda *args: (started.append(args[-1]), begin(*args))[1])
    scheduler.add(make_request("again", ids(1, 300), 100, floor=0))
    go(scheduler)
    assert started and started[0] in kept and len(scheduler.waiting) == 1
    assert not checkpoints.held and all(slot.refs == 1 for each in kept for slot in each.slots)


def test_a_checkpoint_goes_with_the_last_block_of_its_tokens():
    scheduler = make_scheduler(20, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 200))
    checkpoints = scheduler.space.prefix.checkpoints
    checkpoints._use(checkpoints.oldest())  # as if it were younger than its blocks
    assert scheduler.space.prefix.evict() and not len(checkpoints) and held(scheduler, 1) == 0
    assert scheduler.space.tables.arena.used_nbytes == 0


def test_a_failed_request_leaves_no_checkpoint_nor_the_one_that_it_began_on():
    scheduler = make_scheduler(30, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    finished(scheduler, "other", ids(2, 300))
    bad = make_request("b", ids(1, 600), floor=0)
    scheduler.add(bad)
    go(scheduler, 3)
    assert borders(scheduler, ids(1, 600)) == [128, 256, 384, 512]
    scheduler.finish(bad, FinishReason.ERROR, error=RuntimeError("not finite"))  # type: ignore[arg-type]
    assert borders(scheduler, ids(1, 600)) == [] and borders(scheduler, ids(2, 300)) == [128, 256]


def test_a_failed_request_leaves_no_checkpoint_behind_blocks_of_others():
    scheduler = make_scheduler(40, HYBRID, prefix=True)
    first, own = (make_request(name, ids(1, 300), 99, floor=0, **params) for name, params in CONCURRENT.items())
    scheduler.add(first)
    go(scheduler, 4)
    scheduler.space.prefix.checkpoints.clear()
    scheduler.add(own)
    go(scheduler, 4)
    assert borders(scheduler, ids(1, 300)) == [128, 256]
    assert not set(scheduler.space.tables.blocks("own")) & scheduler.space.prefix._of_block.keys()
    scheduler.finish(own, FinishReason.ERROR, error=RuntimeError("not finite"))  # type: ignore[arg-type]
    assert borders(scheduler, ids(1, 300)) == []


def test_bad_values_of_a_block_that_nobody_holds_take_the_checkpoints_behind_it():
    scheduler = make_scheduler(30, HYBRID, prefix=True)
    for salt in (2, 3):
        finished(scheduler, f"r{salt}", ids(1, 128) + ids(salt, 200))
    prefix = scheduler.space.prefix
    keys = [key for key, _, _ in prefix.pieces(ids(1, 128) + ids(2, 200), "", 328)]
    (block,) = prefix._entries[keys[1]].blocks
    scheduler.space.distrust([block])
    assert borders(scheduler, ids(1, 128) + ids(2, 200)) == [128]
    assert borders(scheduler, ids(1, 128) + ids(3, 200)) == [128, 256]


def test_bad_values_of_a_block_whose_place_is_not_known_take_all():
    """Its holder has ended, and another's block stands for its tokens: states of it may be behind any."""
    scheduler = make_scheduler(30, HYBRID, prefix=True)
    finished(scheduler, "a", ids(1, 300))
    store = scheduler.space.tables.store
    block = store.new_block(scheduler.space.tables.main, 0, 0)
    block.holders = ()
    store.drop(block)
    scheduler.space.distrust([block])
    assert not len(scheduler.space.prefix.checkpoints)


def test_a_preempted_request_goes_on_from_its_newest_checkpoint():
    scheduler = make_scheduler(40, HYBRID, prefix=True)
    request = make_request("a", ids(1, 200), 200, floor=0, ignore_eos=True)
    scheduler.add(request)
    go(scheduler, 100)
    scheduler._preempt(request)
    assert go(scheduler)[0] == [("a", 256, 43)] and request.num_preemptions == 1


def test_no_checkpoints_without_a_prefix_cache_or_for_requests_that_share_nothing():
    scheduler = make_scheduler(20, HYBRID)
    assert finished(scheduler, "a", ids(1, 300)).next_checkpoint_at > 10**9
    scheduler = make_scheduler(20, HYBRID, prefix=True)
    scored = make_request("a", ids(1, 300), 1, floor=0, num_prefill_tokens=200)
    scheduler.add(scored)
    go(scheduler, 2)
    assert not len(scheduler.space.prefix.checkpoints)


def test_states_of_a_group_behind_one_with_a_window():
    """A hit needs blocks of both groups, and a checkpoint."""
    window = make_group_spec(DENSE, visible=200)
    full = GroupSpec((1,), BLOCK, DENSE, (0,), make_states(4, 8), make_group_spec(DENSE).recent)
    spec = KVSpec("two", (window, full), False, 0)
    scheduler = make_scheduler(30, spec, prefix=True)
    finished(scheduler, "a", ids(1, 600))
    again = finished(scheduler, "b", ids(1, 600))
    assert again.num_cached_tokens == 512 and scheduler.space.prefix.checkpoints.num_hits == 1


def test_copies_of_equal_size_go_together():
    scheduler = make_scheduler(20, make_spec(DENSE, others=make_states(4, 8, 4)), prefix=True)
    scheduler.add(make_request("a", ids(1, 200), floor=0))
    go(scheduler)
    scheduler.schedule()
    moves: list[Move] = scheduler.space.tables.store.waves[-1]
    command, _ = take_moves(scheduler.space.tables)
    launches = command.waves[-1].launches
    assert sorted((launch.nbytes, len(launch.src)) for launch in launches) == [(4, 2), (8, 1)]
    assert {(m.src, m.dst) for m in moves} == {
        pair for launch in launches for pair in zip(launch.src, launch.dst, strict=True)
    }
