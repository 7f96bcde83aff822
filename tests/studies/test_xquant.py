"""Studies of XQuant: what eta and shared codes do to values, ladders of equal bytes, the paper's own rules."""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.kernels.formats import PageShape
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform.layout import UniformSide
from studies.captured import WINDOW, Attended, conversations
from studies.papers import kivi, quantizers, xquant
from studies.papers.cache import LayerCache
from studies.xquant_accuracy import PARTS, SHARING
from studies.xquant_levels import Sums, add, group_mean, parabola, total
from studies.xquant_pairs import CHOICES, chance, weighted
from studies.xquant_pairs import Sums as PairSums
from studies.xquant_pairs import add as add_pair

from .test_papers import counts


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def side_of(x: Tensor, bits: int, axis: str, group: int) -> UniformSide:
    return Uniform(bits, axis, group).layout(PageShape(*x.shape[1:]), "k" if axis == "channel" else "v")


def attended(length: int, seed: int = 0, spread: str = "normal") -> Attended:
    draw = normal if spread == "normal" else lambda *shape, seed: torch.rand(shape, generator=_generator(seed))
    return Attended(
        normal(2, WINDOW, 128, seed=seed), draw(2, length, 128, seed=seed + 1), draw(2, length, 128, seed=seed + 2)
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("axis", "bits", "group"), product(("channel", "token"), (1, 2), (32, 128)))
def test_values_are_those_of_the_format_at_every_eta(axis: str, bits: int, group: int):
    x = normal(2, 2, 128, 128)
    side = side_of(x, bits, axis, group)
    plain, slope = parabola(x, side)
    for eta in (Fraction(0), Fraction(1, 6)):
        expected = replace(side, eta=eta).family.dequantize(side.family.quantize(x, side), replace(side, eta=eta))
        torch.testing.assert_close(plain + float(eta) * slope, expected, atol=1e-5, rtol=0)
    mean = torch.unflatten(x.mT if axis == "channel" else x, 3, (-1, group)).mean(4, keepdim=True)
    mean = mean.expand(-1, -1, -1, -1, group).flatten(3)
    torch.testing.assert_close(group_mean(x, side).expand_as(x), mean.mT if axis == "channel" else mean)


@pytest.mark.parametrize(
    ("spread", "bits", "group", "best"),
    [
        ("normal", 1, 32, 0.30),
        ("normal", 2, 32, 0.07),
        ("normal", 1, 128, 0.34),
        ("normal", 2, 128, 0.095),
        ("uniform", 1, 128, 0.25),
        ("uniform", 2, 128, 0.068),
    ],
)
def test_best_etas_of_known_distributions(spread: str, bits: int, group: int, best: float):
    layer, sums = attended(WINDOW + 8 * BLOCK_TOKENS, spread=spread), Sums()
    add(sums, layer, layer.output(layer.k, layer.v), "v", bits, group)
    assert sums.best == pytest.approx(best, abs=0.01)
    assert sums.error(sums.best) < min(sums.error(sums.best + shift) for shift in (-0.01, 0.01))
    assert sums.gain(sums.unbiased) == pytest.approx(1) and 0 < sums.unbiased < sums.best
    # At the least error what is missing of the slope is the share of error.
    assert sums.gain(sums.best) == pytest.approx(1 - sums.error(sums.best), abs=0.03)


def test_only_old_blocks_change_and_attention_to_them_follows_their_gain():
    layer = attended(WINDOW + 2 * BLOCK_TOKENS + 50)
    old = layer.old(layer.k)
    assert old.shape == (2, 2, BLOCK_TOKENS, 128) and torch.equal(layer.with_old(layer.k, old), layer.k)
    changed = layer.with_old(layer.k, torch.zeros_like(old))
    assert not changed[:, : 2 * BLOCK_TOKENS].any() and torch.equal(changed[:, 256:], layer.k[:, 256:])
    less, exact, more = (layer.old_share(layer.with_old(layer.k, gain * old)) for gain in (0.5, 1.0, 2.0))
    assert less < exact < more == pytest.approx(1, abs=0.2)
    alone = layer._replace(q=torch.zeros_like(layer.q))  # every token that a query sees counts alike
    seen = torch.arange(306, 434) + 1
    assert alone.old_share(layer.k) == pytest.approx(float((256 / seen).mean()), rel=1e-4)


def test_layers_together_are_one_layer_if_all_are_alike():
    layer, one = attended(WINDOW + BLOCK_TOKENS), Sums()
    add(one, layer, layer.output(layer.k, layer.v), "k", 2, 32)
    both = total([one, one])
    assert both.best == pytest.approx(one.best) and both.gain(0.1) == pytest.approx(one.gain(0.1))
    for eta, error in one.output_error.items():
        assert both.output_error[eta] == pytest.approx(error / one.output)
        assert both.attention[eta] / both.exact_attention == pytest.approx(one.attention[eta] / one.exact_attention)
    assert 0.8 < one.attention[0.09] / one.exact_attention < one.attention[0.0] / one.exact_attention


def test_weighted_averages_of_codes_change_at_five_weights():
    lower, upper = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    found = [tuple(weighted(i / 600 + 1e-4)(lower, upper).flatten().tolist()) for i in range(600)]
    changes = [len(list(group)) for _, group in groupby(found)]
    assert changes == [100, 50, 150, 150, 50, 100]  # at 1/6, 1/4, 1/2, 3/4 and 5/6
    for name in ("gamma 3/4 to 5/6", "gamma 1/2 to 3/4", "gamma 1/4 to 1/2", "gamma 1/6 to 1/4"):
        assert tuple(CHOICES[name](lower, upper).flatten().tolist()) in found
    assert torch.equal(CHOICES["take first"](lower, upper), lower)
    assert torch.equal(CHOICES["take second"](lower, upper), upper)
    assert CHOICES["mean, floor"](lower, upper)[1, 2] == 1 and CHOICES["mean, ceil"](lower, upper)[1, 2] == 2


def test_layers_with_equal_elements_lose_nothing_by_sharing():
    layer = attended(WINDOW + BLOCK_TOKENS)
    sums = {choice: PairSums() for choice in ("own", *CHOICES)}
    found = {("v", 2, 32, choice): value for choice, value in sums.items()}
    expected = layer.output(layer.k, layer.v)
    add_pair(found, (layer, layer), [expected] * 2, "v", 2, 32)
    assert {value.lower for value in sums.values()} == {value.upper for value in sums.values()} == {sums["own"].lower}
    assert sums["own"].equal == 1 and 0.25 < sums["own"].chance < 0.5


def test_sharing_is_compared_at_equal_bytes():
    args = argparse.Namespace(group=[32, 128], sink=0)
    names = [config.name for config in PARTS["sharing"](args)]
    nbytes = [name.rsplit(", ", 1)[1] for name in names]
    sizes = [len(settings) for _ in args.group for settings in SHARING.values()]
    for size in sizes:
        assert len(set(nbytes[:size])) == 1
        del nbytes[:size]
    assert not nbytes and len(set(names)) == len(names)


@pytest.mark.parametrize(("part", "number"), [("calibration", 12), ("eta", 8), ("sides", 14)])
def test_every_ladder_of_a_part_is_another(part: str, number: int):
    args = argparse.Namespace(group=[32, 128], sink=32, etas1=["0", "1/6"], etas2=["0", "0.045"])
    ladders = list(PARTS[part](args))
    assert len({config.rungs for config in ladders}) == len(ladders) == number
    assert all(config.sink == 32 for config in ladders)


def test_conversations_are_attended_as_the_model_does():
    [layers] = conversations("addition:4", 1)
    assert len(layers) == 8 and layers[0].q.shape[1] <= WINDOW
    assert layers[0].output(layers[0].k, layers[0].v).isfinite().all()
    assert layers[0].k.shape == layers[7].v.shape and not torch.equal(layers[0].k, layers[7].k)


# ---- the paper's own rules (golden check 17)

PLAIN = {1: 0.0, 2: 0.0}


def fed(layers: list[LayerCache], inputs: list[Tensor]) -> list[LayerCache]:
    """``layers`` with ``inputs``, one a layer: a prompt of 300 tokens, the others one by one."""
    for pieces in zip(*(x.split([300, *[1] * (x.shape[1] - 300)], dim=1) for x in inputs), strict=True):
        for layer, x in zip(layers, pieces, strict=True):
            layer.attend(x, x, x + 1)
    return layers


def xquant_layers(setting: xquant.Setting, number: int, **options: Any) -> list[LayerCache]:
    make = xquant.scheme(setting, None, **options).layer
    return [make(i) for i in range(number)]


def test_without_calibration_and_sharing_is_kivi():
    x = normal(2, 420, 64)
    layers = [*xquant_layers(xquant.Setting(9, 9, 9, 9), 1, etas=PLAIN), kivi.layer(2, 2)]
    one, other = fed(layers, [x, x])
    assert counts(one) == counts(other)
    assert torch.equal(one.k.tokens, other.k.tokens) and torch.equal(one.v.tokens, other.v.tokens)


def test_layers_with_equal_input_have_equal_values():
    layers = fed(xquant_layers(xquant.Setting(2, 0, 0, 0), 4), [normal(2, 420, 64)] * 4)
    for below, above in (layers[:2], layers[2:]):
        assert counts(below) == counts(above)
        assert torch.equal(below.k.tokens, above.k.tokens) and torch.equal(below.v.tokens, above.v.tokens)


def test_shares_codes_and_not_ranges():
    """V of the second pair: the upper layer has the lower one's codes in its own range; K is not shared."""
    inputs = [normal(2, 420, 64, seed=seed) for seed in range(4)]
    layers = fed(xquant_layers(xquant.Setting(2, 2, 4, 2), 4, etas=PLAIN), inputs)
    done = layers[3].v.quantized
    lower, upper = (torch.unflatten((x + 1).half()[:, :done], 2, (-1, 32)) for x in inputs[2:])
    expected = quantizers.kivi(upper, 1)._replace(codes=quantizers.kivi(lower, 1).codes).values().flatten(2)
    assert torch.equal(layers[3].v.tokens[:, :done], expected)
    [alone] = fed([kivi.layer(1, 1)], inputs[3:])
    assert torch.equal(layers[3].k.tokens, alone.k.tokens) and not torch.equal(layers[3].v.tokens, alone.v.tokens)


@pytest.mark.parametrize(
    ("bits", "eta", "levels"),
    [(1, 1 / 6, [1 / 6, 5 / 6]), (2, 0.045, [0.135, 1.045, 1.955, 2.865]), (2, 0.09, [0.27, 1.09, 1.91, 2.73])],
)
def test_levels(bits: int, eta: float, levels: list[float]):
    """In steps of the levels as they were, whose codes they keep."""
    found = xquant.calibrated(quantizers.kivi(torch.arange(2.0**bits)[None], bits), bits, eta)
    assert found.codes.tolist() == [list(range(2**bits))]
    torch.testing.assert_close(found.values(), torch.tensor([levels]), atol=2e-3, rtol=0)


def test_rounds_halves_of_one_bit_down():
    assert quantizers.kivi(torch.tensor([[0.0, 0.5, 1.0]]), 1).codes.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("sharing", "owners"), [(2, [0, 1, 2, 2, 4, 4, 6]), (3, [0, 1, 2, 2, 2, 5, 5]), (4, [0, 1, 2, 2, 2, 2, 6])]
)
def test_codes_shared_by_groups_of_layers_are_the_lowest_ones(sharing: int, owners: list[int]):
    """From the third layer on; the range is each layer's own."""
    codes = xquant.SideCodes(7, 2, {1: 0.0, 2: 0.0}, sharing)
    x = normal(7, 4, 32)
    for layer, (groups, owner) in enumerate(zip(x, owners, strict=True)):
        found, own = codes.of_layer(layer)(groups), quantizers.kivi(groups, 2)
        expected = own._replace(codes=quantizers.kivi(x[owner], 2).codes).values()
        assert torch.equal(found, expected)


def test_two_bits_of_keys_and_one_of_values_in_all_layers():
    for etas in ({1: 0.0, 2: 0.0}, xquant.ETAS):
        scheme, x = xquant.two_and_one(3, etas=etas), normal(1, 300, 128)
        for number in range(3):
            layer = scheme.layer(number)
            layer.attend(x, x, x)
            assert [len(set(side.tokens[0, :32, 0].tolist())) for side in (layer.k, layer.v)] <= [4, 32]
            assert len(set(layer.v.tokens[0, 0, :32].tolist())) == 2
        assert scheme.preset is not None and scheme.preset.rungs[1].k.startswith("int2-channel-32")
        assert scheme.preset.rungs[1].v.startswith("int1-token-32")


def test_what_chance_gives_beside_the_papers_figure():
    assert chance(2) == (
        "Independent normal layers, 2 bits, groups of 32: codes differ by 0 in 33.7 %, by 1 in 47.9 %, by 2 in 16.3 %, "
        "by 3 in 2.1 %"
    )
    assert chance(1).endswith("by 0 in 50.0 %, by 1 in 50.0 %")
