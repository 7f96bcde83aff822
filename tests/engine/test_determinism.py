"""A deterministic engine: a request's tokens and log-probabilities, bit for bit, alone and beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from qkv_engine import ConfigError, Engine, KVConfig, SamplingParams
from qkv_engine.presets import PRESETS
from qkv_engine.request import RequestOutput

from ..small_demo import small_demo

Ask = tuple[list[int], SamplingParams]

# Ends of sinks, blocks and chunks, and beyond them; a prompt of one token is computed as a generated one.
LENGTHS = (1, 2, 31, 32, 33, 60, 128, 129, 160, 161, 200, 289)
EAGER_AT_ONCE = replace(PRESETS["int4"], name="int4-at-once", recent=0)


def asks(number: int, seed: int, *, most_tokens: int = 8) -> list[Ask]:
    """Requests of which some begin alike; greedy and sampled ones, and some that ask for the prompt's scores."""
    rng, found = Random(seed), list[Ask]()
    common = [rng.randrange(5, 1000) for _ in range(420)]
    for i in range(number):
        prompt = common[: rng.choice((0, 0, 130, 300, 420))] + [
            rng.randrange(5, 1000) for _ in range(rng.choice(LENGTHS))
        ]
        params = SamplingParams(
            max_tokens=rng.randint(1, most_tokens),
            temperature=rng.choice((0.0, 0.9)),
            seed=i,
            logprobs=2,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            ignore_eos=True,
        )
        found.append((prompt, params))
    return found


def answer(output: RequestOutput) -> object:
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, output.prompt_logprobs


def alone(engine: Engine, wanted: Sequence[Ask]) -> list[object]:
    return [answer(engine.generate([prompt], params)[0]) for prompt, params in wanted]


def together(engine: Engine, wanted: Sequence[Ask], seed: int, most: int = 64) -> list[object]:
    """In batches of 3 to ``most``, each in another order than it is answered in."""
    rng, found, first = Random(seed), list[object](), 0
    while first < len(wanted):
        batch = list(enumerate(wanted[first : first + rng.randint(3, most)]))
        rng.shuffle(batch)
        outputs = engine.generate([prompt for _, (prompt, _) in batch], [params for _, (_, params) in batch])
        answers = dict(zip((i for i, _ in batch), map(answer, outputs), strict=True))
        found += [answers[i] for i in range(len(batch))]
        first += len(batch)
    return found


def open_engine(kv: str | KVConfig, **options: Any) -> Engine:
    return Engine(
        kv=kv, deterministic=True, **{"model": small_demo(), "kv_memory": "256MiB", "dtype": "float32", **options}
    )


def compare(kv: str | KVConfig, number: int, *, most: int = 64, **options: Any) -> int:
    """Answers alone, without a prefix cache, against those of batches; returns tokens that were found in the cache."""
    wanted = asks(number, seed=number)
    with open_engine(kv, prefix_caching=False, **options) as engine:
        expected = alone(engine, wanted)
    with open_engine(kv, max_num_batched_tokens=300, **options) as engine:
        found = together(engine, wanted, seed=1, most=most)
        hits = engine.stats().prefix_hit_tokens
    assert [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]] == []
    return hits


@pytest.mark.parametrize("kv", ["bf16", EAGER_AT_ONCE], ids=["dense", "eager"])
def test_neighbours_chunks_and_prefix_hits_change_nothing(kv):
    assert compare(kv, 20, most=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv", ["bf16", "fp32", "int8", "int4", "kivi-2", "kitty-pro", "xquant", EAGER_AT_ONCE], ids=str
)
def test_300_requests(kv):
    hits = compare(kv, 300)
    assert hits > 10_000 or kv not in ("bf16", "fp32", EAGER_AT_ONCE)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "num_threads"), [("float32", 2), ("bfloat16", 1), ("bfloat16", 2)])
def test_other_dtypes_and_threads(dtype, num_threads):
    compare("int8", 60, dtype=dtype, num_threads=num_threads)


@pytest.mark.parametrize("kv", ["bf16", EAGER_AT_ONCE], ids=["dense", "eager"])
def test_what_was_generated_before_a_preemption_is_computed_as_it_was(kv, monkeypatch):
    rng = Random(7)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    wanted = [([rng.randrange(5, 1000) for _ in range(length)], params) for length in (155, 100, 150)]
    with open_engine(kv) as engine:
        expected = alone(engine, wanted)
        scheduler, steps = engine._started.core.scheduler, count()
        schedule = scheduler.schedule

        def preempting() -> object:
            if next(steps) in (7, 11):
                scheduler._preempt(scheduler.running.last)
            return schedule()

        monkeypatch.setattr(scheduler, "schedule", preempting)
        outputs = engine.generate([prompt for prompt, _ in wanted], params)
        assert engine.stats().num_preemptions == 2
    assert [answer(output) for output in outputs] == expected


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv": "auto"}, "auto step down when others need memory.*bf16"),
        ({}, "auto step down"),
        ({"kv": "pm-kvq-4"}, "pm-kvq-4 step down"),
        ({"kv": "patternkv"}, "mined from a whole prompt"),
        ({"kv": "bf16", "tensor_parallel": 2}, "sums over GPUs"),
        ({"kv": "bf16", "host_memory": "1GiB"}, "host memory"),
        ({"kv": "bf16", "max_num_batched_tokens": 127}, "128 or more"),
        ({"kv": "bf16", "model": "qwen3-30b-a3b", "load_format": "random"}, "has experts"),
        ({"kv": "bf16", "model": "qwen3-next-80b-a3b", "load_format": "random"}, "have states"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=f"deterministic=True: .*{why}"):
        Engine(deterministic=True, **options)


def test_a_chunk_is_cut_neither_by_the_budget_nor_by_a_limit_of_time():
    wanted = asks(8, seed=3, most_tokens=3)
    with open_engine("bf16", max_num_batched_tokens=128, max_itl_ms=0.001, prefix_caching=False) as engine:
        assert together(engine, wanted, seed=2, most=8) == alone(engine, wanted)
