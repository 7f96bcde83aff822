"""The vectorised sampler against a plain one, one row at a time, and what requests may rely on."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv_engine.device.sampler import SampledToken, sample_tokens
from qkv_engine.errors import RequestError
from qkv_engine.kernels.sample import Settings, pack_settings, sample, uniform
from qkv_engine.kernels.sample.reference import pick, weigh
from qkv_engine.request import SamplingParams
from qkv_engine.sampling.sample_row import SampleRow
from qkv_engine.sampling.sample_tables import SampleTables


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_row(
    params: SamplingParams,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    **kwargs,
):
    return SampleRow(params, seed, [*prompt, *output], len(prompt), **kwargs)


def draw(logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    """All there is of each row's token."""
    token_ids, special = sample_tokens(logits, SampleTables.pack(rows)).wait()
    return [special.get(i, SampledToken(token_id)) for i, token_id in enumerate(token_ids)]


def sample_ids(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [sampled.token_id for sampled in draw(logits, rows)]


# ---- the plain sampler


def as_float32(value: float) -> float:
    return float(array("f", [value])[0])


def repeating(tokens: list[int], size: int) -> set[int]:
    """The tokens that would repeat a run of ``size`` tokens."""
    runs = [tokens[i : i + size] for i in range(len(tokens) - size + 1)] if size else []
    return {run[-1] for run in runs if run[:-1] == tokens[len(tokens) - size + 1 :]}


def reference_edit(logits: list[float], row: SampleRow) -> list[float]:
    params, output = row.params, row.token_ids[row.num_prompt_tokens :]
    f32 = as_float32
    x = list(logits)
    if params.allowed_token_ids:
        x = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    for word in row.bad_word_ids:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for i in row.stop_ids:
            x[i] = -math.inf
    for i in repeating(row.token_ids, params.no_repeat_ngram_size):
        x[i] = -math.inf
    for i, bias in (params.logit_bias or {}).items():
        x[i] = f32(x[i] + f32(bias))
    repetition = f32(params.repetition_penalty)
    for i in set(row.token_ids):
        x[i] = f32(x[i] / repetition if x[i] > 0 else x[i] * repetition)
    for i in set(output):
        x[i] = f32(f32(x[i] - f32(f32(params.frequency_penalty) * output.count(i))) - f32(params.presence_penalty))
    return x


def reference_sample(logits: torch.Tensor, row: SampleRow) -> int:
    """By the book: sort, cut, add up, walk. Weights are integers as in the sampler, all else is plain."""
    params = row.params
    x = torch.tensor(reference_edit(logits.float().tolist(), row))
    if params.temperature == 0:
        return max(range(len(x)), key=lambda i: (x[i].item(), -i))
    exact = (x - x.max()) * as_float32(1 / (math.log(2) * params.temperature))
    weights, scores = weigh(exact).tolist(), exact.tolist()
    kept = set(range(len(x)))
    order = sorted(range(len(x)), key=lambda i: -scores[i])
    if params.min_p > 0:
        kept = {i for i in kept if scores[i] >= as_float32(math.log2(params.min_p))}
    if params.top_k > 0:
        kept &= {i for i in kept if scores[i] >= scores[order[min(params.top_k, len(order)) - 1]]}
    if params.top_p < 1:
        target, mass = math.ceil(params.top_p * float(sum(weights[i] for i in kept))), 0
        for i in (i for i in order if i in kept):
            mass += weights[i]
            if mass >= target:
                kept = {j for j in kept if scores[j] >= scores[i]}
                break
    total = sum(weights[i] for i in kept)
    left = min(int(uniform(row.seed, row.position) * float(total)), total - 1)
    for i in sorted(kept):
        left -= weights[i]
        if left < 0:
            return i
    raise AssertionError("unreachable")


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    pick = lambda default, *values: rng.choice([default, *values]) if rng.random() < 0.5 else default  # noqa: E731
    ids = lambda n: rng.sample(range(vocab_size), n)  # noqa: E731
    return SamplingParams(
        temperature=rng.choice([0.0, 0.01, 0.7, 1.0, 1.0, 3.0]),
        top_p=pick(1.0, 1e-6, 0.3, 0.9, 0.999),
        top_k=pick(0, 1, 2, 7, 70, vocab_size - 1, vocab_size, vocab_size + 5),
        min_p=pick(0.0, 1e-4, 0.2, 1.0),
        repetition_penalty=pick(1.0, 1.3, 0.7),
        presence_penalty=pick(0.0, 1.5, -0.5),
        frequency_penalty=pick(0.0, 0.25, -2.0),
        min_tokens=pick(0, 1, 4),
        logit_bias=pick(None, {i: rng.uniform(-3, 3) for i in ids(3)}, {ids(1)[0]: 100.0}),
        allowed_token_ids=pick(None, ids(1), ids(5)),
        no_repeat_ngram_size=pick(0, 1, 2, 3),
        logprobs=pick(None, 0, 3),
    )


def random_row(rng: random.Random, vocab_size: int) -> SampleRow:
    tokens = lambda n: [rng.randrange(vocab_size) for _ in range(rng.randrange(n))]  # noqa: E731
    output = tokens(12)
    words = [[rng.randrange(vocab_size)], [*output[-1:], rng.randrange(vocab_size)]] if rng.random() < 0.3 else []
    stop_ids = [rng.randrange(vocab_size)]
    return make_row(
        random_params(rng, vocab_size), seed=rng.randrange(-(2**63), 2**63), prompt=tokens(12), output=output,
        stop_ids=stop_ids, bad_word_ids=words,
    )  # fmt: skip


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([0.5, 3.0, 20.0])
    if rng.random() < 0.5:
        logits = logits.round()  # many ties
    return logits.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))


@pytest.mark.parametrize("vocab_size", [6, 128, 300, 2500])
def test_equals_the_plain_sampler(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    compared = 0
    for _ in range(min(500, 4000 // int(vocab_size**0.5))):
        rows = [random_row(rng, vocab_size) for _ in range(rng.randrange(1, 9))]
        logits = random_logits(rng, len(rows), vocab_size)
        before = logits.clone()
        for i, sampled in enumerate(draw(logits, rows)):
            if sampled.error is None:
                assert sampled.token_id == reference_sample(logits[i], rows[i]), rows[i].params
                compared += 1
            else:
                assert max(reference_edit(logits[i].float().tolist(), rows[i])) == -math.inf
        assert torch.equal(logits, before)
    assert compared > 300


@pytest.mark.parametrize("vocab_size", [1024, 5000])
def test_row_is_independent_of_the_crowd(vocab_size: int) -> None:
    """Bit for bit: alone, among others, in another order."""
    rng = random.Random(5)
    for _ in range(60):
        rows = [random_row(rng, vocab_size) for _ in range(16)]
        logits = random_logits(rng, 16, vocab_size)
        together = draw(logits, rows)
        order = rng.sample(range(16), 16)
        shuffled = draw(logits[order], [rows[i] for i in order])
        for place, i in enumerate(order):
            alone = draw(logits[i : i + 1], [rows[i]])[0]
            assert alone.token_id == together[i].token_id == shuffled[place].token_id


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams()
    same = {sample_ids(logits, [make_row(params, seed=7, output=[1] * 3)])[0] for _ in range(3)}
    assert len(same) == 1
    assert len({sample_ids(logits, [make_row(params, seed=s)])[0] for s in range(50)}) > 40
    assert len({sample_ids(logits, [make_row(params, seed=7, output=[1] * n)])[0] for n in range(50)}) > 40


def test_uniform_is_uniform() -> None:
    values = [uniform(seed, position) for seed in range(-100, 100) for position in range(100)]
    assert all(0 <= value < 1 for value in values)
    counts = [0] * 100
    for value in values:
        counts[int(value * 100)] += 1
    chi2 = sum((count - 200) ** 2 / 200 for count in counts)
    assert 60 < chi2 < 149  # 99 degrees of freedom, about 0.1 % at each end
    assert len(set(values)) == len(values)
    serial = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / len(values)
    assert abs(serial) < 0.002


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=2.0), SamplingParams(top_k=20, top_p=0.9, min_p=0.01)],
)
def test_distribution(params: SamplingParams) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 1.5
    num_draws = 40_000
    rows = [make_row(params, seed=seed) for seed in range(num_draws)]
    counts = torch.tensor(sample_ids(logits.expand(num_draws, -1), rows)).bincount(minlength=60)
    probs = (logits[0].double() / params.temperature).softmax(-1)
    if params.top_k:
        order = probs.argsort(descending=True)
        probs[order[20:]] = 0
        probs[probs < 0.01 * probs.max()] = 0
        probs /= probs.sum()
        num_kept = int((probs[order].cumsum(-1) < 0.9).sum()) + 1
        probs[order[num_kept:]] = 0
    probs /= probs.sum()
    assert int(counts[probs == 0].sum()) == 0
    expected = probs * num_draws
    likely = expected > 5
    chi2 = float(((counts - expected) ** 2 / expected)[likely].sum())
    freedom = int(likely.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_row_fails_alone(poison: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1024, generator=generator)
    params = SamplingParams(temperature=temperature, top_p=0.9, logprobs=2)
    rows = [make_row(params, seed=i) for i in range(5)]
    clean = draw(logits, rows)
    logits[2, 17] = poison
    logits[4] = -math.inf
    sampled = draw(logits, rows)
    for i in (0, 1, 3):
        assert sampled[i] == clean[i]
    for i in (2, 4):
        assert sampled[i].token_id == -1
        assert isinstance(sampled[i].error, RequestError)
        assert "not finite" in str(sampled[i].error)
    plain = draw(logits, [make_row(SamplingParams(temperature=0)) for _ in range(5)])
    assert [s.error is None for s in plain] == [True, True, False, True, False]


def test_masking_everything_is_the_requests_error() -> None:
    params = SamplingParams(allowed_token_ids=[3], min_tokens=2)
    bad, good = make_row(params, stop_ids=[3]), make_row(SamplingParams(), seed=1)
    sampled = draw(torch.zeros(2, 8), [bad, good])
    assert "no token is left" in str(sampled[0].error)
    assert sampled[1].error is None


def test_banned_tokens_are_those_of_due_words_and_each_stop_id_once() -> None:
    words = [[7], [3, 6], [3, 6, 8], [9, 6, 2], [6, 6, 6, 1]]
    params = SamplingParams(min_tokens=3)
    banned = {}
    for output in ([], [3], [3, 6], [3, 6, 6], [6, 6, 6]):
        row = make_row(params, prompt=[9, 3], output=output, stop_ids=[5, 4, 5], bad_word_ids=words)
        banned[tuple(output)] = sorted(row.banned_ids())
    assert banned == {
        (): [4, 5, 7], (3,): [4, 5, 6, 7], (3, 6): [4, 5, 7, 8], (3, 6, 6): [7], (6, 6, 6): [1, 7]
    }  # fmt: skip


def test_a_row_of_edits_costs_the_same_however_often_a_stop_id_is_named() -> None:
    once, often = (make_row(SamplingParams(min_tokens=9), stop_ids=[5] * times) for times in (1, 10_000))
    assert once.banned_ids() == often.banned_ids()


def test_min_tokens_suppress_stop_ids_until_reached() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5] = 9
    params = SamplingParams(temperature=0, min_tokens=2)
    chosen = [sample_ids(logits, [make_row(params, output=[1] * n, stop_ids=[5])])[0] for n in range(4)]
    assert chosen == [0, 0, 5, 5]


def test_bias_allowed_and_bad_words() -> None:
    logits = torch.arange(8.0)[None]
    greedy = lambda **kwargs: SamplingParams(temperature=0, **kwargs)  # noqa: E731
    assert sample_ids(logits, [make_row(greedy(logit_bias={2: 100.0}))]) == [2]
    assert sample_ids(logits, [make_row(greedy(allowed_token_ids=[1, 4]))]) == [4]
    assert sample_ids(logits, [make_row(greedy(), bad_word_ids=[[7]])]) == [6]
    assert sample_ids(logits, [make_row(greedy(), output=[3, 6], bad_word_ids=[[3, 6, 7]])]) == [6]
    assert sample_ids(logits, [make_row(greedy(), output=[6, 3], bad_word_ids=[[3, 6, 7]])]) == [7]
    # A word that the prompt began is not the output's.
    assert sample_ids(logits, [make_row(greedy(), prompt=[3, 6], bad_word_ids=[[3, 6, 7]])]) == [7]


def test_penalties_follow_a_growing_request() -> None:
    """One row lives as long as its request; its counts must equal those of a fresh row at every step."""
    rng = random.Random(2)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)
    logits = random_logits(rng, 1, 40).float()
    row = make_row(params, seed=11, prompt=[1, 2, 2])
    for _ in range(60):
        fresh = SampleRow(params, 11, list(row.token_ids), 3)
        token = sample_ids(logits, [row])[0]
        assert token == sample_ids(logits, [fresh])[0] == reference_sample(logits[0], fresh)
        row.token_ids.append(token)


def test_wide_nucleus_falls_back_to_the_whole_vocabulary() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, :3] = 20
    rows = [make_row(SamplingParams(top_p=0.99), seed=s) for s in (1, 2)]
    flat, peaked = sample_ids(logits, rows)
    assert flat == reference_sample(logits[0], rows[0])
    assert peaked in (0, 1, 2)


def test_a_nucleus_reaches_all_of_top_p() -> None:
    """The best token has half of the weight: enough for a top_p of one half, and not for the least bit more."""
    logits, base_2 = torch.tensor([[0.0, -1.0, -1.0]]), 1 / math.log(2)
    seed = next(seed for seed in range(100) if uniform(seed, 0) > 0.9)
    for top_p, expected in ((0.5, 0), (0.5 + 2**-42, 2)):
        row = torch.frombuffer(bytearray(pack_settings(base_2, 0, top_p, 0.0, seed)), dtype=torch.int64)[None]
        assert int(sample(logits, Settings(row, torch.zeros(1, dtype=torch.int64), True))[0]) == expected


def test_extreme_temperatures() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 50
    best = int(logits.argmax())
    assert sample_ids(logits, [make_row(SamplingParams(temperature=1e-300), seed=s) for s in range(1)]) == [best]
    assert len({sample_ids(logits, [make_row(SamplingParams(temperature=100.0), seed=s)])[0] for s in range(60)}) > 20


def test_weights_are_powers_of_two() -> None:
    """Within 2e-7 relative and one for rounding down, from the peak to where nothing is left."""
    scores = torch.cat(
        (-torch.rand(100_000) * 45, -(2.0 ** torch.arange(-40, 7)), torch.tensor([0.0, -0.0, -math.inf]))
    )
    exact = torch.exp2(40 + scores.double())
    weights = weigh(scores)
    assert bool(((weights - exact).abs() <= 2e-7 * exact + 1).all())
    assert weights[-3:].tolist() == [2**40, 2**40, 0]
    assert not weights[scores < -40.01].any()


def test_walk_is_exact_at_the_edges() -> None:
    """Token i has the half-open share [before, before + weight) of the total."""
    weights = torch.zeros(6, 300, dtype=torch.int64)
    weights[:, 3], weights[:, 130], weights[:, 299] = 1, 1, 2
    u = torch.tensor([0.0, 0.2499, 0.25, 0.4999, 0.5, 1 - 2.0**-53], dtype=torch.float64)[:, None]
    assert pick(weights, u).tolist() == [3, 3, 130, 130, 299, 299]


@given(st.integers(1, 700), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True, allow_subnormal=False))
@settings(max_examples=100, deadline=None)
def test_only_tokens_with_weight_are_drawn(vocab_size: int, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.where(torch.rand(4, vocab_size, generator=generator) < share, -math.inf, 0.0)
    logits[:, seed % vocab_size] = 0
    rows = b"".join(pack_settings(1.0, 0, 1.0, 0.0, seed + i) for i in range(4))
    rows = torch.frombuffer(bytearray(rows), dtype=torch.int64).view(4, -1)
    drawn = sample(logits, Settings(rows, torch.zeros(4, dtype=torch.int64), False))[0]
    assert bool((logits.gather(1, drawn[:, None]) == 0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    """Tokens equal the CPU's, rows stay independent of the crowd, and a bad row fails alone."""
    rng = random.Random(9)
    for vocab_size in (1024, 5000, 151_936):
        rows = [random_row(rng, vocab_size) for _ in range(32)]
        logits = random_logits(rng, 32, vocab_size).cuda()
        logits[5, 7] = math.nan
        together = draw(logits, rows)
        on_cpu = draw(logits.cpu(), rows)
        assert "not finite" in str(together[5].error)
        for i, row in enumerate(rows):
            assert (together[i].error is None) == (on_cpu[i].error is None)
            if i != 5:
                assert draw(logits[i : i + 1], [row])[0].token_id == together[i].token_id
                assert together[i].token_id == on_cpu[i].token_id
