"""A prompt scored behind ``num_prefill_tokens`` gives what decoding gave, token for token."""

from __future__ import annotations

import random

import pytest

from qkv_engine import Engine, KVConfig, RequestError, RequestOutput, RungConfig, SamplingParams

DENSE32 = RungConfig("dense32", "dense32", "dense32")  # 16 bits would make an ulp of a chunk's sums a visible step
INT2 = RungConfig("int2", "int2-channel-32", "int2-token-32")
PATTERNS = RungConfig("patterns", "int2-channel-128-patterns32", "int2-token-128-patterns32")
LADDERS = (
    KVConfig(name="kivi", rungs=(DENSE32, INT2), recent=128, eager=True),
    KVConfig(name="sink", rungs=(DENSE32, INT2), sink=32, eager=True),
    KVConfig(name="ratio", rungs=(DENSE32, INT2), recent_ratio=0.2, eager=True),
    KVConfig(name="patterns", rungs=(DENSE32, PATTERNS), recent=128, eager=True),
)
PROMPT, OUTPUT = 300, 150
RNG = random.Random(0)
IDS = [RNG.randrange(300) for _ in range(PROMPT)]


def engine_of(kv: KVConfig, **options: int) -> Engine:
    return Engine(kv=kv, kv_memory="128MiB", max_model_len=1024, **options)


def logprobs(output: RequestOutput, first: int) -> list[float]:
    """Log-probabilities of the tokens from position ``first`` on, prompt and output."""
    ids = output.prompt_token_ids
    entries = (output.prompt_logprobs or [None] * len(ids))[first:] + (output.outputs[0].logprobs or [])
    return [entry[token].logprob for entry, token in zip(entries, [*ids, *output.token_ids][first:], strict=True)]


@pytest.mark.parametrize("kv", LADDERS, ids=lambda kv: kv.name)
def test_scoring_equals_decoding(kv: KVConfig):
    with engine_of(kv) as engine:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=OUTPUT, logprobs=0, ignore_eos=True)
        (decoded,) = engine.generate(IDS, params)
        forced = [*IDS, *decoded.token_ids[:-1]]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=0,
            prompt_logprobs=0,
            num_prefill_tokens=PROMPT,
            allowed_token_ids=decoded.token_ids[-1:],
        )
        scored, prompt = engine.generate([forced] * 2, [params, SamplingParams(max_tokens=1, prompt_logprobs=0)])
    assert scored.kv == decoded.kv and scored.kv.lowest_bits == 2
    assert prompt.kv.blocks != scored.kv.blocks
    expected = logprobs(decoded, PROMPT)
    assert logprobs(scored, PROMPT) == pytest.approx(expected, abs=2e-3)
    errors = [abs(a - b) for a, b in zip(logprobs(prompt, PROMPT), expected, strict=False)]
    assert max(errors) > 0.1  # a prompt attends to nothing but 16 or 32 bits


def test_small_steps_change_nothing():
    ids = IDS * 2
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, num_prefill_tokens=290)
    found = []
    for budget in (2048, 37):
        with engine_of(LADDERS[0], max_num_batched_tokens=budget) as engine:
            (output,) = engine.generate(ids, params)
        found.append((logprobs(output, 1)[: len(ids) - 1], output.kv))
    assert found[0][0] == pytest.approx(found[1][0], abs=2e-3)
    assert found[0][1] == found[1][1]


def test_more_than_the_prompt_is_refused(demo_engine: Engine):
    with pytest.raises(RequestError, match="num_prefill_tokens=4: more than the prompt has") as caught:
        demo_engine.generate([1, 2, 3], SamplingParams(num_prefill_tokens=4))
    assert "at most 3" in str(caught.value)
