"""The papers' own rules: quantizers, packed words, window traces, and the study's command.

The numbers are of the releases: words as their kernels write them, counts of tokens in full precision as their code
leaves them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from qkv_engine import Engine, SamplingParams
from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.kernels.formats.uniform.reference import encode
from qkv_engine.models.loader import load_model
from studies.papers import kitty, kivi, kvmix, quantizers
from studies.papers.__main__ import DEMO, SCHEMES, full_precision, main
from studies.papers.cache import LayerCache, Side, attention, by_channel, by_token
from studies.papers.decode import generate
from studies.papers.quantizers import Codes, pack, unpack
from studies.papers.three_bits import table

QUANTIZERS: dict[str, Callable[[Tensor, int], Codes]] = {
    "kivi": quantizers.kivi,
    "kitty": quantizers.kitty,
    "kitty simulator": quantizers.kitty_simulator,
    "kvmix": quantizers.kvmix,
}
HALVES = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.0]])  # at 2 bits: the step is 1, three of them lie between two codes
each_quantizer = pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=QUANTIZERS)


def group(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


def side(heads: int, num_tokens: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, num_tokens, dim, generator=torch.Generator().manual_seed(seed))


def counting(rule: Callable[[int], int]) -> Side:
    """A side that counts and changes nothing."""
    return Side(rule, lambda x: x)


# ---- quantizers (golden checks 1 to 3)


@each_quantizer
def test_four_values_have_the_codes_of_their_width(quantize):
    for bits, expected in ((2, [0, 1, 2, 3]), (4, [0, 5, 10, 15])):
        found = quantize(group(0, 1, 2, 3), bits)
        assert found.codes.tolist() == [expected]
        assert found.step.item() == pytest.approx(3 / (2**bits - 1), rel=1e-3)
        torch.testing.assert_close(found.values(), group(0, 1, 2, 3), atol=2e-3, rtol=0)


@each_quantizer
@pytest.mark.parametrize("constant", [0.0, -1.75, 6.1e-5, 3e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_constant_groups_are_exact(quantize, constant: float, dtype: torch.dtype):
    x = torch.full((1, 32), constant, dtype=torch.float16)
    found = quantize(x.to(dtype), 2)
    assert not found.codes.any()
    assert torch.equal(found.values(), x.float())


@pytest.mark.parametrize("faithful", [True, False])
def test_constant_words_of_three_bits_are_exact(faithful: bool):
    found = quantizers.kvmix_three(torch.full((1, 33), 2.5), faithful=faithful)
    assert not found.codes.any() and torch.equal(found.values(), torch.full((1, 33), 2.5))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kivi", [0, 2, 2]), ("kitty simulator", [0, 2, 2]), ("kitty", [1, 2, 3]), ("kvmix", [1, 2, 3])],
)
def test_halves_round_to_even_or_up(name: str, expected: list[int]):
    assert QUANTIZERS[name](HALVES, 2).codes.tolist() == [[0, *expected, 3]]


def test_just_below_a_half_is_no_half_in_kvmix():
    below = torch.tensor(0.5).nextafter(torch.tensor(0.0)).item()
    assert quantizers.kvmix(group(0, below, 3), 2).codes.tolist() == [[0, 0, 3]]


@each_quantizer
@pytest.mark.parametrize("bits", [2, 4])
def test_values_lie_within_half_a_step(quantize, bits: int):
    x = side(64, 8, 32).half().float()
    found = quantize(x, bits)
    # fp16 metadata: a step off by 2^-11 counts up to 15 times, a minimum once; the quotient by as much again.
    slack = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) * 2**-9 + found.minimum.abs() * 2**-11
    assert ((found.values() - x).abs() <= found.step / 2 + slack).all()


@each_quantizer
def test_codes_do_not_change_under_scale_and_shift(quantize):
    """Integers, scaled by a power of two and shifted: exact in fp16, as are their differences."""
    x = torch.randint(0, 61, (256, 32), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0], x[:, 1] = 0, 60  # the step is 20 or 4, exactly
    for bits in (2, 4):
        for a, b in ((0.25, 0.0), (1.0, -30.0), (2.0, 5.0)):
            assert torch.equal(quantize(a * x + b, bits).codes, quantize(x, bits).codes)


@pytest.mark.parametrize("faithful", [True, False])
def test_three_bit_words_do_not_change_under_scale_and_shift(faithful: bool):
    x = torch.randint(0, 22, (256, 33), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0], x[:, 1] = 0, 21
    found = quantizers.kvmix_three(2 * x - 7, faithful=faithful)
    assert torch.equal(found.codes, quantizers.kvmix_three(x, faithful=faithful).codes)


def test_kitty_keeps_a_floor_under_steps():
    """A range of 2^-22: less than a step of the floor, so all codes are 0; without a floor the last would be 3."""
    tiny = group(0, 2**-23, 2**-22)
    assert quantizers.kitty(tiny, 2).codes.tolist() == [[0, 0, 0]]
    assert quantizers.kvmix(tiny, 2).codes.tolist()[0][-1] == 3


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("token_group", [32, 128])
def test_the_engines_codes_differ_next_to_thresholds_alone(bits: int, token_group: int):
    """By one level, in the shares that the pages of the schemes name."""
    x = side(8, 128, 128).half()
    page = make_format(f"int{bits}-channel-{token_group}", torch.bfloat16).layout(PageShape(8, 128, 128), "k")
    ours = encode(x[None], page)[0][0].int()
    for name, share in {"kivi": {2: 8e-4, 4: 4e-3}, "kvmix": {2: 5e-4, 3: 9e-4, 4: 2e-3}}.items():
        if bits in share:
            theirs = by_channel(lambda g, q=QUANTIZERS[name]: q(g, bits).codes, token_group)(x)
            assert (ours - theirs).abs().max() == 1
            assert (ours != theirs).float().mean() < share[bits]


# ---- packed words (golden checks 4 and 5)


def test_two_bit_words():
    codes = torch.tensor([3, 1, 0, 2, 2, 3, 1, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert pack(codes, 2).tolist() == [-95412601]
    assert pack(codes, 2).item() & 0xFFFFFFFF == 0xFA501E87


def test_three_bit_words():
    codes = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0, 7, 5, 3])
    assert pack(codes, 3).tolist() == [-284870281]
    assert pack(codes, 3).item() & 0xFFFFFFFF == 0xEF053977


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_words_unpack_to_their_codes(bits: int):
    per_word = 32 // bits + (bits == 3)
    codes = torch.randint(0, 2**bits, (5, 3 * per_word), generator=torch.Generator().manual_seed(0))
    codes[:, 10::11] %= 4 if bits == 3 else 2**bits
    assert torch.equal(unpack(pack(codes, bits), bits), codes.int())


def test_the_eleventh_element_saturates_or_has_its_own_step():
    x = group(*[0.0] * 9, 7.0, 6.0)
    released, own = (quantizers.kvmix_three(x, faithful=faithful) for faithful in (True, False))
    assert released.codes[0, -1] == 3 and released.values()[0, -1] == 3.0
    assert own.codes[0, -1] == 3 and own.values()[0, -1] == pytest.approx(7.0, rel=1e-3)
    assert torch.equal(released.values()[:, :-1], own.values()[:, :-1])


def test_three_bit_words_cost_what_three_bits_cost():
    """Errors on normal values and bits of a page of 128 tokens; the words never win."""
    rows = {(cells[0], cells[1]): cells for cells in table(2**19).cells}

    def error(*key: str) -> float:
        return float(rows[key][4])

    assert error("11 in 32, as released", "11") == pytest.approx(0.0796, rel=0.02)
    assert float(rows["11 in 32, as released", "11"][5]) == pytest.approx(0.727, rel=0.02)
    assert error("11 in 32, own step", "11") == pytest.approx(0.0210, rel=0.02)
    assert error("plain 3-bit", "32") == pytest.approx(0.0281, rel=0.02)
    assert error("plain 4-bit", "32") == pytest.approx(0.0061, rel=0.02)
    for words, plain in (("33", "32"), ("66", "64"), ("132", "128")):
        assert rows["11 in 32, own step", words][3] == rows["plain 3-bit", plain][3]  # bits
        assert error("11 in 32, own step", words) > 1.4 * error("plain 3-bit", plain)


# ---- windows (golden checks 12 to 14)


def fed(layer: LayerCache, num_tokens: int, *, heads: int = 1, dim: int = 128, seed: int = 0) -> LayerCache:
    """``layer`` with that many more tokens, a prompt if they are its first, one by one if not."""
    x = side(heads, num_tokens, dim, seed)
    pieces = [x] if layer.k.length == 0 else x.split(1, dim=1)
    for piece in pieces:
        layer.attend(piece, piece, piece + 1)
    return layer


def counts(layer: LayerCache) -> tuple[int, int, int, int]:
    """K in full precision, V in full precision, K quantized, V quantized."""
    return layer.k.full, layer.v.full, layer.k.quantized, layer.v.quantized


def test_kivi_trace():
    layer = fed(kivi.layer(2, 2), 300)
    assert counts(layer) == (44, 128, 256, 172)
    attended = []
    layer.k.simulate = lambda x: attended.append(x.shape[1]) or x
    fed(layer, 83)
    assert counts(layer) == (127, 128, 256, 255) and not attended
    fed(layer, 1)
    assert counts(layer) == (0, 128, 384, 256) and attended == [128]


@pytest.mark.parametrize(("length", "k", "v"), [(5, 5, 5), (127, 127, 127), (128, 0, 128), (129, 1, 128)])
def test_kivi_prompts(length: int, k: int, v: int):
    assert counts(fed(kivi.layer(2, 2), length))[:2] == (k, v)


def test_kivi_attends_a_full_residual_before_it_is_quantized():
    """The token that completes R tokens still sees all of them as they were."""
    layer = fed(kivi.layer(2, 2), 127)
    x = side(1, 1, 128, seed=9)
    expected = attention(x.half().float(), torch.cat((layer.k.tokens, x.half()), 1), torch.cat((layer.v.tokens, x), 1))
    torch.testing.assert_close(layer.attend(x.half().float(), x, x.half().float()), expected, atol=1e-3, rtol=1e-3)
    assert layer.k.full == 0


def test_kitty_trace():
    """Sink 32, three pages and 84 tokens of K; two pages, 84 tokens that wait and a window of 128 of V."""
    layer = fed(kitty.layer(16), 500)
    assert counts(layer) == (32 + 84, 32 + 84 + 128, 3 * 128, 2 * 128)
    fed(layer, 43)
    assert counts(layer) == (32 + 127, 32 + 127 + 128, 384, 256)
    fed(layer, 1)
    assert counts(layer) == (32, 32 + 128, 512, 384)


def test_kitty_sink_grows_while_a_short_prompt_is_continued():
    layer = fed(fed(kitty.layer(16), 10), 149)
    assert counts(layer) == (159, 159, 0, 0)
    first = layer.k.tokens[:, :32].clone()
    fed(layer, 200)
    assert counts(layer) == (32 + 71, 32 + 71 + 128, 256, 128)
    assert torch.equal(layer.k.tokens[:, :32], first)


def test_kitty_simulator_trace():
    """No prompt up to 160 tokens is quantized; then a page with the 129th token after it, and V token by token."""
    make = partial(kitty.layer, 12, simulator=True)
    assert counts(fed(make(), 160)) == (160, 160, 0, 0)
    assert counts(fed(make(), 161)) == (32 + 1, 32 + 128, 128, 1)
    assert counts(fed(make(), 288)) == (32, 32 + 128, 256, 128)
    layer = fed(fed(make(), 160), 1)
    assert counts(layer) == (32 + 1, 32 + 128, 128, 1)
    assert counts(fed(layer, 127)) == (32 + 128, 32 + 128, 128, 128)
    assert counts(fed(layer, 1)) == (32 + 1, 32 + 128, 256, 129)


def window_trace(ratio: float, length: int, steps: int, group: int = 32) -> list[int]:
    """Tokens in full precision after a prompt and each of ``steps`` further tokens."""
    window = counting(kvmix.keep_share(ratio, group))
    found = []
    for num_tokens in (length, *(1,) * steps):
        window.append(torch.zeros(1, num_tokens, 1))
        window.settle()
        found.append(window.full)
    return found


@pytest.mark.parametrize(
    ("ratio", "length", "expected"),
    [(0.1, 1000, [104, 41, 10, 11]), (0.1, 688, [80, 17, 18, 19]), (0.2, 688, [144, 49, 18, 19])],
)
def test_kvmix_trace(ratio: float, length: int, expected: list[int]):
    assert window_trace(ratio, length, len(expected) - 1) == expected


@pytest.mark.parametrize(
    ("ratio", "token_group", "least", "most", "mean"),
    [
        (0.1, 32, 3, 34, 18.5),
        (0.2, 32, 7, 38, 22.5),
        (0.3, 32, 13, 44, 28.5),
        (0.2, 11, 2, 12, 7.0),
        (0, 32, 0, 31, 15.5),
    ],
)
def test_kvmix_windows_settle_in_a_small_range(ratio: float, token_group: int, least: int, most: int, mean: float):
    steady = window_trace(ratio, 1000, 40 + 10 * token_group, token_group)[41:]
    assert (min(steady), max(steady)) == (least, most)
    assert sum(steady) / len(steady) == pytest.approx(mean, abs=0.01)


def test_kvmix_quantizes_before_it_attends_and_a_prompt_after():
    layer = fed(kvmix.layer(2, 2), 96, dim=32)
    assert layer.k.quantized == 64  # all but 9 tokens, in groups of 32
    x = side(1, 1, 32, seed=9).half().float()
    seen = layer.attend(x, x, x)
    assert torch.equal(seen, attention(x, layer.k.tokens, layer.v.tokens))
    prompt, fresh = side(1, 64, 32).half().float(), kvmix.layer(2, 2)
    assert torch.equal(fresh.attend(prompt, prompt, prompt), attention(prompt, prompt, prompt))


# ---- what is quantized, and to what (golden checks 19, 20 and 22)


def test_kvmix_without_a_window_has_the_codes_of_kivi():
    """Values of eighths with a range of 3; they differ at halves that are even, and nowhere else."""
    x = torch.randint(0, 25, (2, 64, 32), generator=torch.Generator().manual_seed(0)) / 8
    x[:, ::32], x[:, 1::32] = 0, 3
    ours = Side(kvmix.keep_share(0.0, 32), by_channel(lambda g: quantizers.kvmix(g, 2).codes.float(), 32))
    theirs = Side(lambda full: full // 32 * 32, by_channel(lambda g: quantizers.kivi(g, 2).codes.float(), 32))
    for one in (ours, theirs):
        one.append(x)
        one.settle()
        assert one.full == 0
    is_half = (x == 0.5) | (x == 2.5)
    assert is_half.any() and torch.equal(ours.tokens == theirs.tokens, ~is_half)


def test_kvmix_average_bits():
    scores = list(range(32))
    for share, k_mean, v_mean in ((0.2, 2.1875, 2.375), (0.3, 2.28125, 2.5625)):
        bits = kvmix.layer_bits(kvmix.top_layers(scores, scores[::-1], share), 32)
        assert sum(k for k, _ in bits) / 32 == k_mean and sum(v for _, v in bits) / 32 == v_mean
        assert bits[-1] == (3, 2) and bits[0] == (2, 4)  # K and V are ranked apart


@pytest.mark.slow  # imports transformers
def test_kvmix_scores_are_means_of_gradient_norms():
    texts = ["<|im_start|>user\nWhat is 5+4?<|im_end|>\n", "<|im_start|>user\nSort: 3, 1, 2<|im_end|>\n"]
    first, second, both = (kvmix.gradient_scores(DEMO, part) for part in (texts[:1], texts[1:], texts))
    for one, other, mean in zip(first, second, both, strict=True):
        assert len(mean) == 8 and min(mean) > 0 and len(set(mean)) == 8
        assert mean == pytest.approx([(x + y) / 2 for x, y in zip(one, other, strict=True)])


@pytest.mark.parametrize("faithful", [True, False])
def test_kvmix_keys_of_three_bits(faithful: bool):
    layer = fed(kvmix.layer(3, 4, faithful=faithful), 100, dim=32)
    assert layer.k.quantized == (77 if faithful else 66)  # 20 tokens stay, and what fills no word, or no three
    x = side(1, 100, 32).half().float()
    error = (layer.k.tokens - x)[:, : layer.k.quantized].square().mean((0, 2))
    eleventh = torch.arange(layer.k.quantized) % 11 == 10
    assert error[eleventh].mean() > (20 if faithful else 4) * error[~eleventh].mean()


def test_kitty_without_or_with_all_channels_boosted():
    pages = side(3, 16, 128)
    for num_boosted, bits in ((0, 2), (16, 4)):
        assert torch.equal(kitty.page_codes(pages, num_boosted).codes, quantizers.kitty(pages, bits).codes)


def test_kitty_boosts_the_strongest_channels_and_the_first_of_equals():
    pages = torch.ones(1, 8, 128) * torch.tensor([1.0, 3, 2, 3, 2, 0, 2, -4])[None, :, None]
    assert kitty.boosted_channels(pages, 4)[0].nonzero().flatten().tolist() == [1, 2, 3, 7]
    order = torch.tensor([7, 2, 0, 5, 1, 3, 4, 6])
    distinct = pages + torch.arange(8)[None, :, None] / 16
    assert torch.equal(
        kitty.boosted_channels(distinct[:, order], 3), kitty.boosted_channels(distinct, 3)[:, order]
    )  # moved with the channels


def test_kitty_boost_lowers_the_error_of_every_page():
    pages = side(8, 64, 128) * torch.rand(8, 64, 1, generator=torch.Generator().manual_seed(1)) * 4
    errors = [(kitty.page_codes(pages, n).values() - pages).square().mean((1, 2)) for n in (0, 8, 16)]
    assert (errors[1] < errors[0]).all() and (errors[2] < errors[1]).all()


LAYERS: dict[str, Callable[[], LayerCache]] = {
    "kivi": lambda: kivi.layer(2, 2),
    "kitty": lambda: kitty.layer(16),
    "kitty simulator": lambda: kitty.layer(12, simulator=True),
    "kvmix": lambda: kvmix.layer(2, 2),
    "kvmix 3": lambda: kvmix.layer(3, 4),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_head_is_quantized_alone_as_among_others(make: Callable[[], LayerCache]):
    together = fed(make(), 400, heads=3)
    x = side(3, 400, 128)
    for head in range(3):
        alone = make()
        alone.attend(x[head, None], x[head, None], x[head, None] + 1)
        for ours, theirs in ((alone.k, together.k), (alone.v, together.v)):
            assert ours.quantized and torch.equal(ours.tokens[0], theirs.tokens[head])


@pytest.mark.parametrize("name", ["kivi", "kitty"])
def test_what_is_quantized_depends_on_the_length_alone(name: str):
    """A prompt at once, and the same tokens one by one: not so in KVmix, whose window remembers."""
    x, at_once, stepwise = side(2, 420, 128), LAYERS[name](), LAYERS[name]()
    at_once.attend(x, x, x)
    for piece in (x[:, :50], *x[:, 50:].split(1, dim=1)):
        stepwise.attend(piece, piece, piece)
    assert counts(at_once) == counts(stepwise)
    assert torch.equal(at_once.k.tokens, stepwise.k.tokens) and torch.equal(at_once.v.tokens, stepwise.v.tokens)


def test_groups_lie_along_tokens_or_channels():
    x = torch.arange(2 * 4 * 6.0).view(2, 4, 6)
    assert torch.equal(
        by_channel(lambda g: g.mean(-1, keepdim=True).expand_as(g), 2)(x)[0, :, 0], group(3, 3, 15, 15)[0]
    )
    assert torch.equal(
        by_token(lambda g: g.mean(-1, keepdim=True).expand_as(g), 3)(x)[0, 0], group(1, 1, 1, 4, 4, 4)[0]
    )


# ---- the command


def test_the_simulated_sequence_is_the_engines_in_full_precision(demo_engine: Engine):
    prompt = demo_engine.tokenizer.encode("<|im_start|>user\nWhat is 512+49?<|im_end|>\n<|im_start|>assistant\n")
    params = SamplingParams(temperature=0.0, max_tokens=80)
    expected = demo_engine.generate([prompt], params)[0].outputs[0].token_ids
    model = load_model(str(DEMO), device=torch.device("cpu")).model
    found = generate(model, [full_precision() for _ in range(8)], prompt, 80, {demo_engine.tokenizer.eos_token_id})
    assert found == [token for token in expected if token != demo_engine.tokenizer.eos_token_id]
    assert 40 < len(found) < 80


def test_schemes_are_asked_side_by_side_with_their_blocks(capsys: pytest.CaptureFixture[str]):
    words = ["--scheme", "fp16,kivi-2,kitty", "--task", "ledger:2", "--samples", "2", "-o", "json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["scheme"] for row in rows] == ["fp16", "kivi-2", "kitty"]
    assert rows[0]["right"] == rows[0]["preset_right"] == 2
    assert rows[1]["preset"] == "k2v2-g32" and rows[0]["full_k"] > 60
    assert "ledger 2: 2 of 2" in captured.err


def test_unknown_schemes_and_tasks_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main(["--scheme", "kivi-3"])
    said = capsys.readouterr().err
    assert leaving.value.code == 2 and all(name in said for name in SCHEMES)
    assert main(["--scheme", "fp16", "--task", "juggling"]) == 2
    assert "not a task" in capsys.readouterr().err
