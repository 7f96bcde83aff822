"""Log-probabilities of tokens against a softmax in 64 bits."""

from __future__ import annotations

import math

import pytest
import torch

from qkv_engine.device.logprobs import TokenLogprobs, token_logprobs
from qkv_engine.errors import RequestError
from qkv_engine.request import SamplingParams

from .test_sampler import draw, make_row


def check_logprobs(found: TokenLogprobs, logits: torch.Tensor, k: int) -> None:
    expected = logits.double().log_softmax(-1)
    assert found.logprob == pytest.approx(expected[found.token_id].item(), abs=1e-5)
    assert found.rank == int((logits > logits[found.token_id]).sum()) + 1
    assert [rank for _, _, rank in found.top] == list(range(1, k + 1))
    values = [logprob for _, logprob, _ in found.top]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(expected.topk(k).values.tolist(), abs=1e-5)
    for token_id, logprob, _ in found.top:
        assert logprob == pytest.approx(expected[token_id].item(), abs=1e-5)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4)) * 4
    ks = [0, 1, 5, None, 20, 3]
    rows = [
        make_row(SamplingParams(logprobs=k, temperature=i % 2, logit_bias={9: 50.0}), seed=i) for i, k in enumerate(ks)
    ]
    for i, sampled in enumerate(draw(logits, rows)):
        if ks[i] is None:
            assert sampled.logprobs is None
        else:
            assert sampled.logprobs is not None and sampled.logprobs.token_id == sampled.token_id == 9
            check_logprobs(sampled.logprobs, logits[i], ks[i])


def test_log_probabilities_near_one_keep_their_digits() -> None:
    logits = torch.zeros(1, 1024)
    logits[0, 3], logits[0, 5] = 30.0, 14.0
    (found,) = token_logprobs(logits, [3], 0, [[5]])
    exact = -math.log1p(math.exp(-16) + 1022 * math.exp(-30))
    assert found.logprob == pytest.approx(exact, rel=0.3) and exact > -2e-7  # a unit in the last place of 30 is 2e-6
    assert found.others == [(5, pytest.approx(-16, abs=1e-5), 2)]


def test_token_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv_engine.device.logprobs.LOGPROB_CHUNK", 7 * 50)
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(6)).bfloat16()
    targets = [i % 50 for i in range(30)]
    found = token_logprobs(logits, targets, 4)
    assert [f.token_id for f in found] == targets
    for i, logprobs in enumerate(found):
        check_logprobs(logprobs, logits[i].float(), 4)
    others = [[i % 50, (i * 7) % 50, 49][: i % 4] for i in range(30)]
    named = token_logprobs(logits, targets, 1, others)
    for i, logprobs in enumerate(named):
        check_logprobs(logprobs, logits[i].float(), 1)
        entries, expected = logprobs.entries(None), logits[i].double().log_softmax(-1)
        best = int(logits[i].argmax())
        assert set(entries) == {targets[i], best, *others[i]}
        assert {t: one.logprob for t, one in entries.items()} == pytest.approx(
            {t: expected[t].item() for t in entries}, abs=1e-5
        )
        assert all(one.rank == int((logits[i] > logits[i, t]).sum()) + 1 for t, one in entries.items() if t != best)
    logits[20, 3] = math.nan
    with pytest.raises(RequestError, match="not finite"):
        token_logprobs(logits, targets, 4)
