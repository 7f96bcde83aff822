"""Cached prefixes under pressure, on the demo model: they step down, are found narrow, and are computed again."""

from __future__ import annotations

from qkv_engine import Engine, SamplingParams

from ..small_demo import BLOCK_NBYTES, small_demo
from .test_mixed_precision import long_prompts

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
FULL = 32 + 5 * 128  # tokens of a prompt of 700 that are cached


def test_prefixes_step_down_before_they_are_given_up_and_no_request_pays():
    prompts = [long_prompts(1, 700, seed=seed)[0] for seed in range(4)]
    with Engine(small_demo(), kv="auto", kv_memory=15 * BLOCK_NBYTES) as engine:
        first = [engine.generate([prompt], SamplingParams(**GREEDY))[0] for prompt in prompts]
        stats = engine.stats()
        assert stats.num_demotions == 0 < stats.num_idle_demotions == sum(stats.idle_demotions.values())
        again = [engine.generate([prompt], SamplingParams(**GREEDY))[0] for prompt in prompts]
        stats = engine.stats()
        assert [output.num_cached_tokens for output in again] == [FULL] * 4 and stats.num_demotions == 0
        told = [output.kv.cached_tokens for output in again]
        assert all(sum(tokens.values()) == FULL and tokens["dense16"] >= 32 for tokens in told)
        assert {name for tokens in told for name in tokens} == {"dense16", "int8", "int4"}
        assert stats.prefix_hits == {name: sum(tokens.get(name, 0) for tokens in told) for name in stats.prefix_hits}
        assert all(output.kv.cached_tokens == {} for output in first) and stats.prefix_hit_tokens == 4 * FULL
        engine.reset_stats()
        stats = engine.stats()
        assert (stats.num_idle_demotions, stats.prefix_hits, stats.prefix_query_tokens) == (0, {}, 0)


def test_a_pinned_request_answers_as_a_cold_one_after_its_prefix_went_narrow():
    prompt, *others = [long_prompts(1, 700, seed=seed)[0] for seed in range(4)]
    pinned = SamplingParams(**GREEDY, kv_pinned=True)
    with Engine(small_demo(), kv="auto", kv_memory=20 * BLOCK_NBYTES) as engine:
        cold = engine.generate([prompt], pinned)[0]
        for other in others:
            engine.generate([other], SamplingParams(**GREEDY))
        narrow = engine.generate([prompt], SamplingParams(**GREEDY))[0]
        assert sum(n for name, n in narrow.kv.cached_tokens.items() if name != "dense16") > 0
        again = engine.generate([prompt], pinned)[0]
        assert again.num_cached_tokens < FULL and again.kv.lowest_bits == 16
        assert again.outputs[0].token_ids == cold.outputs[0].token_ids
        third = engine.generate([prompt], pinned)[0]  # the wide blocks took the place of the narrow ones
        assert third.kv.cached_tokens == {"dense16": FULL} and third.outputs[0].token_ids == cold.outputs[0].token_ids
        used = engine.stats()
        assert used.kv_bytes_used == 0 and used.num_demotions == 0
