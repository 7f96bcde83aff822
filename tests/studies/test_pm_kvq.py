"""PM-KVQ's golden checks: its shift, its words, nesting, shrunk pages in attention, the steps at which it shrinks."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.kernels.formats import PageShape, Side, SideBytes, make_format
from qkv_engine.kernels.formats.uniform.reference import shrink
from studies.papers import pm_kvq
from studies.papers.pm_kvq import DIRECT, EQUIVALENT, MODIFIED, Trigger, halve, quantize, shrink_steps


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_shift_is_division_by_an_odd_number_to_the_nearest(bits: int):
    """Golden check 9, every code; ours and the release's."""
    codes = torch.arange(4**bits)
    found = pm_kvq.equivalent_shift(codes, bits)
    exact = codes.double() / (2**bits + 1)
    assert torch.equal(found, (exact + 0.5).floor().long()) and torch.equal(found, exact.round().long())
    assert torch.equal(shrink(codes, 2 * bits, bits), found)
    assert found[0] == 0 and found[-1] == 2**bits - 1 and bool((found.diff() >= 0).all())
    counts = found.bincount().tolist()
    assert counts == [2 ** (bits - 1) + 1, *[2**bits + 1] * (2**bits - 2), 2 ** (bits - 1) + 1]


def test_the_published_constants_and_tables():
    assert pm_kvq.equivalent_shift(torch.arange(16), 2).tolist() == [0] * 3 + [1] * 5 + [2] * 5 + [3] * 3
    steps = pm_kvq.equivalent_shift(torch.arange(256), 4).diff().nonzero().flatten() + 1
    assert steps.tolist() == [17 * k - 8 for k in range(1, 16)]
    steps = pm_kvq.equivalent_shift(torch.arange(65536), 8).diff().nonzero().flatten() + 1
    assert steps.tolist() == [257 * k - 128 for k in range(1, 256)]


def test_words_have_the_first_code_in_their_high_bits():
    """Golden check 7."""
    assert pm_kvq.pack(torch.tensor([3, 1, 0, 2, 2, 3, 1, 0]), 2).tolist() == [0xD2B4]
    assert pm_kvq.pack(torch.tensor([13, 6, 9, 3]), 4).tolist() == [0xD693]


@pytest.mark.parametrize(
    ("dtype", "shares"),
    [(torch.float64, (0, 0, 0)), (torch.float32, (1e-3,) * 3), (torch.bfloat16, (0.4, 0.03, 0.01))],
)
def test_halving_down_from_16_bits_ends_at_direct_codes(dtype: torch.dtype, shares: tuple[float, ...]):
    """Golden check 10 by the paper's quantizer; steps in bf16, as released, move a third of the codes of 8 bits."""
    x = normal(512, 128)
    found, bits = quantize(x, 16, dtype), 16
    for share in shares:
        bits //= 2
        found = halve(found, bits)
        differs = found.codes != quantize(x, bits, dtype).codes
        assert differs.double().mean() <= share
        assert (found.codes - quantize(x, bits, dtype).codes).abs().max() <= 1
        assert bits != 8 or dtype != torch.bfloat16 or differs.double().mean() > 0.2


def test_the_ablations_lose_more():
    x = normal(2048, 128)
    errors = []
    for variant in (EQUIVALENT, MODIFIED, DIRECT):
        found = quantize(x, 4, torch.float32)
        errors.append(float((halve(found, 2, variant).values() - x).square().mean()))
    assert errors == sorted(errors) and errors[1] > 1.1 * errors[0] and errors[2] > 1.3 * errors[1]
    fours = [halve(quantize(x, 8, torch.float32), 4, variant) for variant in (EQUIVALENT, MODIFIED, DIRECT)]
    eight = [float((codes.values() - x).square().mean()) for codes in fours]
    assert eight == sorted(eight)


def test_a_small_group_loses_levels_to_the_released_floor_of_steps():
    """The engine keeps its own step; the release's is at least 1e-5 at 16 bits."""
    x = torch.linspace(0, 0.3, 128)
    found = quantize(x, 16, torch.float32)
    for bits in (8, 4, 2):
        found = halve(found, bits)
    assert len(found.codes.unique()) == 2
    side = make_format("int2-token-128", torch.float32).layout(PageShape(1, 128, 128), "k")
    rows = side.family.quantize(x.expand(1, 1, 128, 128), side)
    assert len(side.family.dequantize(rows, side)[0, 0, 0].unique()) == 4


def page(x: torch.Tensor, side: Side) -> SideBytes:
    return side.family.quantize(x, side)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_shrunk_page_is_the_page_sealed_at_fewer_bits(name: str, dtype: torch.dtype):
    """Golden checks 10 and 11: bytes, endpoints, logits and outputs."""
    shape, x = PageShape(2, 128, 128), normal(3, 2, 128, 128, seed=1).to(dtype)
    sides = {bits: make_format(f"int{bits}-token-128", dtype).layout(shape, name) for bits in (8, 4, 2)}
    family, q = sides[8].family, normal(3, 2, 4, 128, seed=2)
    rows, whole = page(x, sides[8]), family.dequantize(page(x, sides[8]), sides[8])
    for wide, narrow in ((8, 4), (4, 2)):
        rows = family.demote(rows, sides[wide], sides[narrow])
        direct = page(x, sides[narrow])
        assert torch.equal(rows.codes, direct.codes) and torch.equal(rows.meta, direct.meta)
        back = family.dequantize(rows, sides[narrow])
        torch.testing.assert_close(back.amax(-1), whole.amax(-1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(back.amin(-1), whole.amin(-1), rtol=1e-6, atol=1e-6)
        attend = family.cpu.scores if name == "k" else family.cpu.values
        assert torch.equal(attend(q, rows, sides[narrow]), attend(q, direct, sides[narrow]))


@pytest.mark.parametrize(
    ("budget_bits", "max_len", "steps"),
    [
        (4, 8192, [(2049, 8), (4033, 4), (7905, 2)]),
        (8, 32768, [(16385, 8), (32705, 4)]),
        (4, 32768, [(8193, 8), (16321, 4), (32481, 2)]),
    ],
)
def test_the_steps_at_which_a_layer_shrinks(budget_bits: int, max_len: int, steps: list[tuple[int, int]]):
    """Golden check 15, as released; with the floor that the budget stands for, the last step does not come."""
    assert list(shrink_steps(Trigger(budget_bits, max_len), max_len)) == steps
    assert list(shrink_steps(Trigger(budget_bits, max_len, budget_bits), max_len)) == steps[:-1]


@pytest.mark.parametrize(("max_len", "last"), [(32768, 31985), (8192, 7409)])
def test_two_bits_end_in_an_error_without_a_floor(max_len: int, last: int):
    trigger = Trigger(2, max_len)
    assert [bits for _, bits in shrink_steps(trigger, last - 1)] == [8, 4, 2]
    with pytest.raises(MemoryError, match=f"^{last} tokens"):
        trigger.halves(last)
    assert not any(Trigger(2, max_len, 2, bits=2).halves(stored) for stored in range(last, max_len))


def test_a_layers_cache_shrinks_as_its_trigger_says():
    """First token and window in full, the body as if it had been quantized to the new bits at once."""
    layer = pm_kvq.layer(Trigger(4, 512, 2))
    k, v = normal(2, 420, 128, seed=3), normal(2, 420, 128, seed=4)
    widths = []
    for start in range(420):
        token = slice(start, start + 1)
        layer.attend(normal(4, 1, 128, seed=start), k[:, token], v[:, token])
        assert layer.trigger is not None
        widths.append(layer.trigger.bits)
    assert [width for width, before in zip(widths[1:], widths, strict=False) if width != before] == [8, 4, 2]
    body = 419 // 128 * 128
    for side, x in ((layer.k, k), (layer.v, v)):
        assert side.quantized == body and side.full == 420 - body
        tokens, exact = side.tokens, x.half().float()
        assert torch.equal(tokens[:, :1], exact[:, :1]) and torch.equal(tokens[:, 1 + body :], exact[:, 1 + body :])
        direct = quantize(exact[:, 1 : 1 + body], 2)
        step = direct.step.float().amax()
        assert (tokens[:, 1 : 1 + body] - direct.values()).abs().max() < 1.1 * step
        assert tokens[:, 1 : 1 + body].unflatten(-1, (1, 128))[0, 0].unique().numel() <= 4
