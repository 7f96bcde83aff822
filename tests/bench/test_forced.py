"""Teacher forcing: the divergence is that of whole distributions, through the cache that decoding reads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from qkv_engine import Engine, KVConfig, RequestError, RungConfig, SamplingParams
from qkv_engine.bench import forced
from qkv_engine.bench.forced import ForcedText, compare, divergence, refer

from ..small_demo import small_demo

DENSE32 = RungConfig("dense32", "dense32", "dense32")
COARSE = KVConfig(name="coarse", rungs=(DENSE32, RungConfig("int1", "int1-channel-32", "int1-token-32")), eager=True)
VOCAB, PREFILL, LENGTH = 1024, 130, 140
RNG = random.Random(1)
IDS = [RNG.randrange(300) for _ in range(LENGTH)]
TEXTS = [ForcedText(IDS, PREFILL, PREFILL), ForcedText(IDS[::-1], 1, 132), ForcedText(IDS[5:], 120, 125)]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    options = {"model": small_demo(), "kv_memory": "8MiB", "max_model_len": 256, "prefix_caching": False}
    with Engine(kv="fp32", **options) as wide, Engine(kv=COARSE, **options) as narrow:
        yield wide, narrow


def whole_rows(engine: Engine, text: ForcedText) -> torch.Tensor:
    """Log-probabilities [T, V] in the places of the scored tokens, some of the vocabulary at a time."""
    wanted = [list(range(first, min(first + 20, VOCAB))) for first in range(0, VOCAB, 20)]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            prompt_logprob_ids=[ids] * len(text.ids),
            num_prefill_tokens=text.num_prefill,
        )
        for ids in wanted
    ]
    rows = torch.zeros(len(text.ids) - text.first_scored, VOCAB, dtype=torch.float64)
    for ids, output in zip(wanted, engine.generate([text.ids] * len(wanted), params), strict=True):
        assert output.prompt_logprobs is not None
        for row, entry in zip(rows, output.prompt_logprobs[text.first_scored :], strict=True):
            assert entry is not None
            row[ids] = torch.tensor([entry[token].logprob for token in ids], dtype=torch.float64)
    return rows


def test_the_divergence_is_that_of_whole_rows(engines: tuple[Engine, Engine]) -> None:
    wide, narrow = engines
    text = TEXTS[0]
    p, q = whole_rows(wide, text), whole_rows(narrow, text)
    assert p.exp().sum(dim=-1).tolist() == pytest.approx([1.0] * len(p), abs=1e-5)
    exact = (p.exp() * (p - q)).sum(dim=-1)
    _, reference = refer(wide, [text])
    (score,) = compare(narrow, [text], reference).scores
    own = torch.tensor(text.ids[text.first_scored :])[:, None]
    assert score.tokens == LENGTH - PREFILL and exact.sum() > 0.1
    assert 0.8 * exact.sum() < score.kl < 1.01 * exact.sum()  # rounding may move a code of 1 bit
    assert score.changed == int((p.argmax(dim=-1) != q.argmax(dim=-1)).sum()) > 0
    assert score.nll == pytest.approx(-q.gather(1, own).sum().item(), rel=0.01)
    assert score.exact == bool((q.argmax(dim=-1) == own[:, 0]).all())


def test_the_reference_does_not_diverge_from_itself(engines: tuple[Engine, Engine]) -> None:
    wide, _ = engines
    found, reference = refer(wide, TEXTS)
    again = compare(wide, TEXTS, reference)
    assert [score.changed for score in again.scores] == [0, 0, 0]
    assert max(abs(score.kl) for score in again.scores) < 1e-5
    assert [score.nll for score in again.scores] == pytest.approx([score.nll for score in found.scores], rel=1e-5)
    assert [score.tokens for score in found.scores] == [10, 8, 10] and found.lowest_bits == 32


def test_texts_are_handed_over_a_few_at_a_time(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = engines
    _, reference = refer(wide, TEXTS)
    together = compare(narrow, TEXTS, reference)
    calls = []
    generate = narrow.generate
    monkeypatch.setattr(narrow, "generate", lambda *args: calls.append(len(args[0])) or generate(*args))
    monkeypatch.setattr(forced, "TOKENS_AT_ONCE", 2 * LENGTH)
    apart = compare(narrow, TEXTS, reference)
    assert calls == [2, 1] and together.lowest_bits == apart.lowest_bits == 1
    assert [score.kl for score in apart.scores] == pytest.approx([score.kl for score in together.scores], rel=1e-2)


def test_a_text_that_cannot_be_computed_is_an_error(engines: tuple[Engine, Engine]) -> None:
    with pytest.raises(RequestError):
        refer(engines[0], [ForcedText([1] * 300, 10, 10)])


def test_all_other_tokens_count_as_one() -> None:
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]]).log()
    q = torch.tensor([[0.4, 0.4, 0.15, 0.05], [0.7, 0.1, 0.1, 0.1]]).log()
    whole = (p.exp() * (p - q)).sum(dim=-1)
    assert divergence(p, q).tolist() == pytest.approx(whole.tolist(), abs=1e-6)
    merged = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    expected = (merged[0] * (merged[0] / merged[1]).log()).sum()
    found = divergence(p[:, :2], q[:, :2])[0].item()
    assert found == pytest.approx(expected.item()) and found < whole[0]
    assert divergence(torch.zeros(1, 1), torch.zeros(1, 1)).tolist() == [0.0]
