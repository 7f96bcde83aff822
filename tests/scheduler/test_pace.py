"""Chunks under a limit of time: the pace by itself, and the batches of a scheduler that follows it."""

from __future__ import annotations

import random

import pytest

from qkv_engine.device.gpu.mixed import padded_chunk
from qkv_engine.kv.manager import KVManager
from qkv_engine.request import FinishReason
from qkv_engine.scheduler import Pace, Scheduler
from qkv_engine.scheduler.pace import CHUNK_STEP, FIRST_CHUNK, LEAST_CHUNK, NUM_STEPS

from .common import BLOCK, DENSE, LADDER, FixedPace, make_request, make_scheduler, make_space, run, shape
from .test_prefill_tokens import EAGER

BASE, SLOPE = 0.005, 2e-5  # seconds of a step without chunks, and of a chunk token


def play(pace: Pace, steps: int, base: float = BASE, slope: float = SLOPE) -> list[int]:
    """Chunk tokens of the next steps of a long prompt on a machine that takes exactly these times."""
    found = []
    for _ in range(steps):
        found.append(pace.chunk_tokens)
        pace.note(base + slope * found[-1], found[-1])
    return found


def warm_pace(max_itl: float, base: float = BASE) -> Pace:
    pace = Pace(max_itl)
    for _ in range(NUM_STEPS):
        pace.note(base, 0)
    return pace


# The pace alone


def test_chunks_grow_to_the_last_multiple_below_the_limit():
    # 0.005 + 2e-5 * 1,000 tokens would be exactly the limit.
    assert play(warm_pace(0.0251), 5) == [256, 512, 896, 896, 896]
    assert play(warm_pace(0.0051), 3) == [FIRST_CHUNK, LEAST_CHUNK, LEAST_CHUNK]


def test_a_limit_below_the_shortest_step_leaves_the_least_chunk():
    pace = warm_pace(1e-300)
    assert play(pace, 20)[1:] == [LEAST_CHUNK] * 19


def test_two_slow_steps_are_heeded_at_once_and_a_faster_machine_within_a_few():
    pace = warm_pace(0.0251)
    play(pace, 10)
    slower = play(pace, 12, slope=4 * SLOPE)
    assert slower[:2] == [896, 896] and slower[2:] == [128] * 10  # the two steps that show it, then at most 251 tokens
    assert play(pace, 3 * NUM_STEPS)[-1] == 896


def test_a_base_that_changes_is_followed():
    pace = warm_pace(0.0251)
    play(pace, 10)
    for base, tokens in ((0.015, 384), (0.024, LEAST_CHUNK), (0.005, 896)):
        for _ in range(NUM_STEPS):
            pace.note(base, 0)
        play(pace, 3 * NUM_STEPS, base)
        assert pace.chunk_tokens == tokens


def test_a_base_that_nobody_sees_any_more_does_not_hold_prompts_back():
    pace = warm_pace(0.0251, base=0.1)  # many requests decoded, then few, and every step has a chunk
    assert pace.chunk_tokens == FIRST_CHUNK
    assert play(pace, 3 * NUM_STEPS)[-1] >= 512


@pytest.mark.parametrize("when", [0, 1, 5, 30])
def test_one_step_that_compiles_a_kernel_starves_no_prompt(when: int):
    pace = warm_pace(0.0251)
    play(pace, when)
    before = pace.chunk_tokens
    pace.note(10.0, before)
    after = play(pace, 4)
    assert (after[0] >= before if when else after[0] == LEAST_CHUNK) and after[-1] >= 512
    pace.note(10.0, 0)
    assert pace.chunk_tokens == play(pace, 2)[-1] >= 512


def test_a_slow_spell_is_forgotten():
    pace = warm_pace(0.0251)
    play(pace, 10)
    for _ in range(5):
        pace.note(3.0, pace.chunk_tokens)
    chunks = play(pace, 3 * NUM_STEPS)
    assert chunks[0] == LEAST_CHUNK and chunks.index(LEAST_CHUNK * 2) < NUM_STEPS and chunks[-1] == 896


def test_whatever_the_times_chunks_are_sizes_that_a_captured_step_has():
    rng = random.Random(3)
    for _ in range(200):
        pace, most = Pace(10 ** rng.uniform(-6, 2)), FIRST_CHUNK
        for _ in range(30):
            tokens = rng.choice((0, 1, 63, 64, 65, pace.chunk_tokens, rng.randrange(4096)))
            pace.note(rng.choice((0.0, 1e-12, 10 ** rng.uniform(-5, 2))), tokens)
            most = max(most, 2 * tokens)
            chunk = pace.chunk_tokens
            assert LEAST_CHUNK <= chunk <= most and padded_chunk(chunk) == chunk


def test_noise_leaves_the_limit_to_most_steps():
    rng, pace, times = random.Random(5), warm_pace(0.02), []
    for _ in range(400):
        tokens = pace.chunk_tokens if rng.random() < 0.5 else 0
        times.append((BASE + SLOPE * tokens) * rng.uniform(0.95, 1.05))
        pace.note(times[-1], tokens)
    late = sum(seconds > pace.max_itl for seconds in times)
    assert late <= 4 and max(times) > 0.8 * pace.max_itl


# The scheduler


def paced(chunk_tokens: int, num_blocks: int = 40, budget: int = 512, ladder=LADDER, seqs: int = 8) -> Scheduler:
    space = make_space(num_blocks, ladder)
    return Scheduler(space, max_num_seqs=seqs, max_num_batched_tokens=budget, pace=FixedPace(chunk_tokens))


def begin(scheduler: Scheduler, *names: str, prompt: int = 10, max_tokens: int = 50) -> None:
    """Lets requests run that decode from the next step on."""
    for name in names:
        scheduler.add(make_request(name, prompt, max_tokens))
    run(scheduler, scheduler.schedule())


def steps(scheduler: Scheduler, number: int) -> list[list[tuple[str, int, int]]]:
    found = []
    for _ in range(number):
        batch = scheduler.schedule()
        found.append(shape(batch))
        run(scheduler, batch)
    return found


def test_a_long_prompt_beside_decoders_is_computed_in_small_chunks():
    scheduler = paced(128)
    begin(scheduler, "a", "b")
    scheduler.add(make_request("long", 300))
    assert steps(scheduler, 4) == [
        [("a", 10, 1), ("b", 10, 1), ("long", 0, 128)],
        [("a", 11, 1), ("b", 11, 1), ("long", 128, 128)],
        [("a", 12, 1), ("b", 12, 1), ("long", 256, 44)],
        [("a", 13, 1), ("b", 13, 1), ("long", 300, 1)],
    ]


def test_prompts_alone_are_not_limited():
    scheduler = paced(128)
    scheduler.add(make_request("one", 700, max_tokens=2))
    scheduler.add(make_request("two", 700))
    assert steps(scheduler, 4) == [
        [("one", 0, 512)],
        [("one", 512, 188), ("two", 0, 324)],
        [("one", 700, 1), ("two", 324, 128)],  # one decodes
        [("two", 452, 248)],  # one has ended
    ]


def test_all_prompts_of_a_step_share_the_limit_in_order_of_arrival():
    scheduler = paced(100)
    begin(scheduler, "a")
    scheduler.add(make_request("b", 130))
    scheduler.add(make_request("c", 50))
    scheduler.add(make_request("d", 60))
    assert [work[1:] for work in steps(scheduler, 3)] == [
        [("b", 0, 100)],
        [("b", 100, 30), ("c", 0, 50), ("d", 0, 20)],
        [("b", 130, 1), ("c", 50, 1), ("d", 20, 40)],
    ]


def test_prompts_for_which_no_tokens_are_left_keep_no_younger_decoder_waiting():
    scheduler = paced(100, ladder=EAGER)
    begin(scheduler, "a")
    scheduler.add(make_request("one", 500, num_prefill_tokens=10))
    scheduler.add(make_request("two", 500, num_prefill_tokens=10))
    scheduler.add(make_request("young", 20))
    assert steps(scheduler, 3) == [
        [("a", 10, 1), ("one", 0, 10), ("two", 0, 10), ("young", 0, 20)],
        [("a", 11, 1), ("young", 20, 1), ("one", 10, 100)],
        [("a", 12, 1), ("young", 21, 1), ("one", 110, 100)],
    ]


def test_a_limit_above_the_budget_changes_nothing():
    batches = []
    for pace in (None, FixedPace(10**6)):
        scheduler = Scheduler(make_space(40, LADDER), max_num_seqs=8, max_num_batched_tokens=200, pace=pace)
        begin(scheduler, "a", "b")
        scheduler.add(make_request("long", 500))
        batches.append(steps(scheduler, 8))
    assert batches[0] == batches[1]


def test_a_step_computes_so_many_tokens_of_prompts_at_least():
    scheduler = paced(LEAST_CHUNK)
    begin(scheduler, "a")
    scheduler.add(make_request("long", 300))
    assert scheduler.schedule().num_chunk_tokens == scheduler.min_step_tokens
    assert paced(LEAST_CHUNK, budget=20).min_step_tokens == 20 and make_scheduler(4, budget=300).min_step_tokens == 300


def test_a_token_in_flight_counts_as_decoding_until_it_is_the_last():
    scheduler = paced(64)
    scheduler.add(make_request("a", 10, max_tokens=2))
    scheduler.schedule()
    scheduler.add(make_request("long", 400))
    assert shape(scheduler.schedule()) == [("a", 10, 1), ("long", 0, 64)]  # a step ahead of the first token
    assert shape(scheduler.schedule()) == [("long", 64, 336)]  # its last token is in flight


def test_chunks_behind_the_prefill_end_earlier_and_never_later():
    scheduler = paced(100, ladder=EAGER)
    begin(scheduler, "a")
    scheduler.add(make_request("scored", 500, num_prefill_tokens=200))
    assert [work[-1] for work in steps(scheduler, 6)] == [
        ("scored", 0, 100),
        ("scored", 100, 100),  # the prefill ends
        ("scored", 200, 88),  # block 0 may step down
        ("scored", 288, 100),
        ("scored", 388, 28),  # block 1
        ("scored", 416, 84),
    ]


def test_a_preempted_request_recomputes_in_small_chunks_and_all_finish(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVManager, "admits", lambda *args: True)
    scheduler = paced(64, num_blocks=9, ladder=DENSE)
    for name in ("old", "young"):
        scheduler.add(make_request(name, 2 * BLOCK, max_tokens=5 * BLOCK, floor=0))
    seen, over = set[str](), 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        over += batch.has_single_tokens and batch.num_chunk_tokens > 64
        run(scheduler, batch)
        seen |= {request_id for request_id, start, number in shape(batch) if start == 0 and number == 64}
        scheduler.space.tables.check_integrity()
    assert scheduler.num_preemptions and seen == {"young"} and not over


def test_whatever_comes_all_finish_and_no_step_exceeds_the_limit():
    rng = random.Random(11)
    scheduler = paced(64, num_blocks=30, seqs=6, budget=300)
    for i in range(40):
        scheduler.add(make_request(f"r{i}", rng.randrange(1, 500), max_tokens=rng.randrange(1, 60)))
    num_limited = 0
    while scheduler.has_work:
        decodes = any(request.decodes for request in scheduler.running)
        batch = scheduler.schedule()
        assert batch.items and (not decodes or batch.num_chunk_tokens <= 64)
        num_limited += decodes and batch.num_chunk_tokens > 0
        run(scheduler, batch)
        if rng.random() < 0.02 and scheduler.running:
            scheduler.finish(scheduler.running.first, FinishReason.ABORT)
    assert num_limited > 40 and CHUNK_STEP == 2 * LEAST_CHUNK
