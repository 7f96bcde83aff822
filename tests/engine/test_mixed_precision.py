"""The engine on ladders with several rungs: pressure instead of preemption, floors, shared prefixes, recovery."""

from __future__ import annotations

import logging
import random
import re

import pytest

from qkv_engine import CapacityError, Engine, RequestError, RequestOutput, SamplingParams
from qkv_engine.bench import tasks
from qkv_engine.intake import Intake

from ..small_demo import BLOCK_NBYTES, small_demo


def long_prompts(number: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1000) for _ in range(length)] for _ in range(number)]


def ledgers(engine: Engine, number: int, size: int) -> tuple[list[list[int]], list[str]]:
    """Prompts and right answers of ledger tasks."""
    rng = random.Random(1)
    items = [tasks.ledger(rng, size) for _ in range(number)]
    chats = [engine.tokenizer.chat_prompt([{"role": "user", "content": prompt}])[1] for prompt, _, _ in items]
    return chats, [answer for _, _, answer in items]


def is_right(output: RequestOutput, answer: str) -> bool:
    return output.text.rsplit("\n", 1)[-1] == answer


def test_memory_short_of_16_bits_is_answered_by_stepping_down():
    """Six ledgers on memory for about three: all run together, none is preempted, all are right."""
    with Engine(kv="auto", kv_memory=16 * 4 * BLOCK_NBYTES, prefix_caching=False) as engine:
        prompts, answers = ledgers(engine, 6, 16)
        params = SamplingParams(temperature=0.0, max_tokens=500)
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
        assert stats.num_preemptions == 0
        assert stats.demotions["dense16->int8"] > 10
        assert [is_right(o, a) for o, a in zip(outputs, answers, strict=True)] == [True] * 6
        assert {o.kv.lowest_bits for o in outputs} & {8, 4}
        assert stats.kv_bytes_used == 0 and stats.kv_bytes_peak <= stats.kv_bytes_total


@pytest.mark.parametrize(("kv", "narrow"), [("int8", "int8"), pytest.param("kivi-4", "int4", marks=pytest.mark.slow)])
def test_eager_ladders_settle_what_is_older_than_the_window(kv: str, narrow: str):
    with Engine(kv=kv, kv_memory=64 * 4 * BLOCK_NBYTES, prefix_caching=False) as engine:
        prompts, answers = ledgers(engine, 2, 16)
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=500))
        assert all(is_right(o, a) for o, a in zip(outputs, answers, strict=True))
        for output in outputs:
            assert output.kv.blocks[narrow] >= 2
            assert output.kv.blocks.get("dense16", 0) <= (3 if kv == "kivi-4" else 2)


def test_answers_do_not_depend_on_chunks_or_company_under_an_eager_ladder():
    prompt = long_prompts(1, 400)[0]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found = []
    for budget, company in ((2048, 0), (70, 0), (300, 3)):
        with Engine(small_demo(), kv="int4", kv_memory=64 * BLOCK_NBYTES, max_num_batched_tokens=budget) as engine:
            others = long_prompts(company, 350, seed=9)
            found.append(engine.generate([prompt, *others], params)[0].outputs[0].token_ids)
    assert found[0] == found[1] == found[2]


def test_pinned_and_floored_requests_keep_their_precision():
    with Engine(small_demo(), kv="auto", kv_memory=16 * BLOCK_NBYTES, prefix_caching=False) as engine:
        shared = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
        params = [SamplingParams(kv_pinned=True, **shared), SamplingParams(kv_floor="int8", **shared)]
        params += [SamplingParams(**shared)] * 5
        pinned, floored, *others = engine.generate(long_prompts(7, 350), params)
        assert set(pinned.kv.blocks) == {"dense16"} and pinned.kv.lowest_bits == 16
        assert set(floored.kv.blocks) <= {"dense16", "int8"}
        assert any("int8" in o.kv.blocks or "int4" in o.kv.blocks for o in others)
        assert engine.stats().num_preemptions == 0
        with pytest.raises(RequestError, match="int4"):
            engine.generate([[5]], SamplingParams(kv_floor="int2"))
        with pytest.raises(CapacityError, match="kv_floor"):
            engine.generate([[5] * 2000], SamplingParams(kv_pinned=True, max_tokens=100))
        assert engine.generate([[5] * 2000], SamplingParams(max_tokens=4, ignore_eos=True))[0].finished


def test_the_floor_of_a_request_is_looked_up_when_it_is_submitted():
    with Engine(small_demo(), kv="auto", kv_memory=16 * BLOCK_NBYTES) as engine:
        intake = Intake(engine._started)
        asked = [{"kv_floor": name} for name in (None, "dense16", "int8", "int4")]
        asked.append({"kv_floor": "int4", "kv_pinned": True})
        found = [intake.streamed([5], SamplingParams(max_tokens=3, **each), None, None) for each in asked]
        assert [submission.floor for submission in found] == [2, 0, 1, 2, 0]
        found[2].make_completions()
        assert found[2].completions[0].request.floor == 1
        with pytest.raises(RequestError, match="Choose from dense16, int8, int4"):
            intake.streamed([5], SamplingParams(kv_floor="int3"), None, None)


def test_a_shared_prefix_is_computed_once():
    head = long_prompts(1, 600)[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine(small_demo(), kv="auto", kv_memory=64 * BLOCK_NBYTES) as engine:
        cold = engine.generate([[*head, 7]], params)[0]
        before = engine.stats().prompt_tokens
        warm = engine.generate([[*head, 7]], params)[0]
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32 + 4 * 128)
        assert engine.stats().prompt_tokens - before == 601 - 544
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        salted = engine.generate([[*head, 7]], SamplingParams(cache_salt="x", temperature=0.0, max_tokens=1))[0]
        assert salted.num_cached_tokens == 0
        stats = engine.stats()
        assert stats.kv_bytes_used == 0 < stats.kv_bytes_cached
        assert stats.prefix_hit_tokens == 544
    with Engine(small_demo(), kv="auto", kv_memory=64 * BLOCK_NBYTES, prefix_caching=False) as engine:
        assert [engine.generate([[*head, 7]], params)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_requests_that_decode_over_shared_blocks_answer_as_alone():
    head, tails = long_prompts(1, 300)[0], long_prompts(4, 9, seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    memory = 64 * BLOCK_NBYTES
    with Engine(small_demo(), kv="fp32", kv_memory=memory, prefix_caching=False) as engine:
        alone = [engine.generate([head + tail], params)[0].outputs[0].token_ids for tail in tails]
    with Engine(small_demo(), kv="fp32", kv_memory=memory) as engine:
        engine.generate([head], params)
        outputs = engine.generate([head + tail for tail in tails], params)
    assert all(output.num_cached_tokens for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_cached_blocks_give_way_before_anything_steps_down():
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with Engine(small_demo(), kv="auto", kv_memory=24 * BLOCK_NBYTES) as engine:
        for i in range(8):
            engine.generate(long_prompts(1, 700, seed=i), params)
        stats = engine.stats()
        assert stats.num_demotions == 0 and stats.kv_bytes_cached > 0


def test_with_a_quota_one_tenant_does_not_push_anothers_blocks_down():
    params = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    with Engine(small_demo(), kv="auto", kv_memory=16 * BLOCK_NBYTES, kv_quota=0.5, prefix_caching=False) as engine:
        victim = SamplingParams(tenant="victim", **params)
        attacker = SamplingParams(tenant="attacker", **params)
        outputs = engine.generate(long_prompts(8, 350), [victim] + [attacker] * 7)
        assert set(outputs[0].kv.blocks) == {"dense16"}
        assert any(set(o.kv.blocks) - {"dense16"} for o in outputs[1:])
        assert all(o.finished and o.error is None for o in outputs)


@pytest.mark.parametrize("place", ["schedule", "launch_moves"])
def test_a_step_that_breaks_off_is_recovered_from(place: str, monkeypatch: pytest.MonkeyPatch):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = long_prompts(3, 200)
    with Engine(small_demo(), kv="fp32", kv_memory=64 * BLOCK_NBYTES) as engine:
        expected = [o.outputs[0].token_ids for o in engine.generate(prompts, params)]
        core = engine._started.core
        target = core.scheduler if place == "schedule" else core.runner.cache
        original, calls = getattr(target, place), []

        def flaky(*args):
            result = original(*args)
            calls.append(1)
            if len(calls) == 20:
                raise KeyError("injected")
            return result

        monkeypatch.setattr(target, place, flaky)
        found = [o.outputs[0].token_ids for o in engine.generate(prompts, params)]
        assert found == expected and len(calls) > 60
        core.space.tables.check_integrity()
        assert engine.stats().kv_bytes_used == 0


def test_every_step_down_is_explained_in_the_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="qkv_engine")
    with Engine(small_demo(), kv="auto", kv_memory=16 * BLOCK_NBYTES, prefix_caching=False) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        engine.generate(long_prompts(5, 500), params)
        demotions = engine.stats().num_demotions
    lines = [r.getMessage() for r in caplog.records if "stepped down" in r.getMessage()]
    assert sum(int(re.search(r"(\d+) blocks? \(", line)[1]) for line in lines) == demotions > 0
    assert "dense16 -> int8" in lines[0] and "tokens" in lines[0]
