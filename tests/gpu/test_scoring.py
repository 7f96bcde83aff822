"""Scoring on a GPU: given tokens attend to the blocks that they attend to in decoding."""

from __future__ import annotations

import random

import pytest

from qkv_engine import Engine, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu

PROMPT, OUTPUT = 700, 300
RNG = random.Random(0)
IDS = [RNG.randrange(300) for _ in range(PROMPT)]


def scores(output: RequestOutput) -> list[float]:
    """Log-probabilities of the prompt's tokens behind ``PROMPT``."""
    entries = (output.prompt_logprobs or [])[PROMPT:]
    return [entry[token].logprob for entry, token in zip(entries, output.prompt_token_ids[PROMPT:], strict=True)]


@pytest.mark.parametrize("kv", ["int4", "kivi-2", "kitty-pro", "patternkv", "xquant"])
def test_scoring_equals_decoding(kv: str, report: list[str], device: str = "cuda"):
    with Engine(kv=kv, dtype="float32", kv_memory="256MiB", max_model_len=2048, device=device) as engine:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=OUTPUT, logprobs=0, ignore_eos=True)
        (decoded,) = engine.generate(IDS, params)
        params = [SamplingParams(max_tokens=1, prompt_logprobs=0, num_prefill_tokens=n) for n in (PROMPT, None)]
        scored, prompt = engine.generate([IDS + decoded.token_ids[:-1]] * 2, params)
    entries = (decoded.outputs[0].logprobs or [])[:-1]
    expected = [entry[token].logprob for entry, token in zip(entries, decoded.token_ids, strict=False)]
    error, other = (
        sum(abs(a - b) for a, b in zip(scores(output), expected, strict=True)) / len(expected)
        for output in (scored, prompt)
    )
    report.append(f"{kv:9} mean difference from decoding: scored {error:.5f} nats, as a prompt {other:.5f}")
    assert scored.kv == decoded.kv
    assert error < other / 2  # what 16-bit KV rounds may seal to other codes
