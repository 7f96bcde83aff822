"""A prompt scored behind ``num_prefill_tokens`` gives what decoding gave, token for token."""

from __future__ import annotations

import random

import pytest

from qkv_engine import Engine, KVConfig, RequestError, RequestOutput, RungConfig, SamplingParams

from ..small_demo import small_demo

DENSE32 = RungConfig("dense32", "dense32", "dense32")  # 16 bits would make an ulp of a chunk's sums a visible step
INT2 = RungConfig("int2", "int2-channel-32", "int2-token-32")
PATTERNS = RungConfig("patterns", "int2-channel-128-patterns32", "int2-token-128-patterns32")
LADDERS = (
    KVConfig(name="sink", rungs=(DENSE32, INT2), sink=32, eager=True),
    KVConfig(name="ratio", rungs=(DENSE32, INT2), recent_ratio=0.2, eager=True),
    KVConfig(name="patterns", rungs=(DENSE32, PATTERNS), recent=128, eager=True),
)
PROMPT, OUTPUT = 300, 120
RNG = random.Random(0)
IDS = [RNG.randrange(300) for _ in range(PROMPT)]


def engine_of(kv: KVConfig, **options: int) -> Engine:
    return Engine(small_demo(), kv=kv, kv_memory="128MiB", max_model_len=1024, **options)


def scores(output: RequestOutput) -> list[float]:
    """Log-probabilities of the prompt's tokens behind ``PROMPT``."""
    entries = (output.prompt_logprobs or [])[PROMPT:]
    return [entry[token].logprob for entry, token in zip(entries, output.prompt_token_ids[PROMPT:], strict=True)]


@pytest.mark.parametrize("kv", LADDERS, ids=lambda kv: kv.name)
def test_scoring_equals_decoding(kv: KVConfig):
    with engine_of(kv) as engine:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=OUTPUT, logprobs=0, ignore_eos=True)
        (decoded,) = engine.generate(IDS, params)
        params = [SamplingParams(max_tokens=1, prompt_logprobs=0, num_prefill_tokens=n) for n in (PROMPT, None)]
        scored, prompt = engine.generate([IDS + decoded.token_ids[:-1]] * 2, params)
    assert scored.kv == decoded.kv and scored.kv.lowest_bits == 2
    assert prompt.kv != scored.kv
    entries = (decoded.outputs[0].logprobs or [])[:-1]
    expected = [entry[token].logprob for entry, token in zip(entries, decoded.token_ids, strict=False)]
    # Products of one row round otherwise than those of many, on some CPUs a little more: 2.1e-3 was seen.
    assert scores(scored) == pytest.approx(expected, abs=5e-3)
    errors = [abs(a - b) for a, b in zip(scores(prompt), expected, strict=True)]
    assert max(errors) > 0.1  # the tokens of a prompt attend to each other at full precision


def test_small_steps_change_nothing():
    found = []
    for budget in (2048, 37):
        with engine_of(LADDERS[0], max_num_batched_tokens=budget) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, num_prefill_tokens=PROMPT)
            (output,) = engine.generate(IDS * 2, params)
        found.append(output)
    # Products of few rows round otherwise, and now and then a number lands on the other side of a code's border.
    assert scores(found[0]) == pytest.approx(scores(found[1]), abs=1e-2)
    assert found[0].kv == found[1].kv


def test_more_than_the_prompt_is_refused(small_engine: Engine):
    with pytest.raises(RequestError, match="num_prefill_tokens=4: more than the prompt has") as caught:
        small_engine.generate([1, 2, 3], SamplingParams(num_prefill_tokens=4))
    assert "at most 3" in str(caught.value)


@pytest.mark.parametrize("detokenize", [True, False])
def test_tokens_with_log_probabilities_have_a_text_where_text_is_wanted(detokenize: bool, small_engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, prompt_logprobs=0, detokenize=detokenize)
    (output,) = small_engine.generate([60, 61], params)
    (own,) = (output.prompt_logprobs or [])[1].values()
    (sampled,) = (output.outputs[0].logprobs or [])[0].values()
    assert [isinstance(one.decoded_token, str) for one in (own, sampled)] == [detokenize] * 2


def test_named_tokens_have_log_probabilities_beside_the_prompts_own(small_engine: Engine):
    likeliest = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    (whole,) = small_engine.generate(IDS, likeliest)
    named = [
        [],
        *([token for token in entry if token != IDS[i]] for i, entry in enumerate(whole.prompt_logprobs[1:], 1)),
    ]
    wanted = [ids[:20] for ids in named]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprob_ids=wanted)
    (found,) = small_engine.generate(IDS, params)
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None
    for token, ids, entry, every in zip(IDS, wanted, found.prompt_logprobs, whole.prompt_logprobs, strict=True):
        if entry is not None:
            assert list(entry) == [token, *ids]
            known = {one: every[one].logprob for one in entry if one in every}
            assert len(known) >= 20 and {one: entry[one].logprob for one in known} == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize("ids", [[[]] * 3, [[1]]])
def test_named_tokens_are_a_list_for_each_of_the_prompts(ids: list[list[int]], small_engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprob_ids=ids)
    with pytest.raises(RequestError, match=f"for each of {len(ids)} tokens, the prompt has 2. Give 2 lists"):
        small_engine.generate([5, 6], params)
