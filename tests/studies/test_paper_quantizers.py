"""Quantizers and packed words of KIVI, Kitty and KVmix; the numbers are those of their releases' kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qkv_engine.kernels.formats import PageShape, make_format
from qkv_engine.kernels.formats.uniform.reference import encode
from studies.papers import quantizers
from studies.papers.cache import by_channel
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
