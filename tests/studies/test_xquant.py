"""XQuant by the paper's own rules: eta and codes shared by layers (golden check 17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from studies.papers import kivi, quantizers, xquant
from studies.papers.cache import LayerCache

from .test_papers import counts


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
