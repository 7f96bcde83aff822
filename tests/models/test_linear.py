"""The packed product against the plain one, and the norm that the CPU takes a shorter way to."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from qkv_engine.kernels.linear import cpu, linear, linear_swiglu, pack_weight, padded_rows
from qkv_engine.models import layers
from qkv_engine.models.layers import Linear, RMSNorm

SIZES = [(1, 1, 1), (1, 64, 32), (2, 7, 13), (3, 256, 1408), (33, 704, 256), (129, 65, 127), (0, 16, 8)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("m", "i", "o"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("few_rows", [0, 2])
def test_packed_equals_reference(m, i, o, dtype, with_bias, few_rows, monkeypatch):
    monkeypatch.setattr(cpu, "FEW_ROWS", few_rows)
    generator = torch.Generator().manual_seed(m * i + o)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in [(m, i), (o, i), (o,)])
    out = linear(x, pack_weight(weight), bias if with_bias else None)
    expected = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert out.shape == (m, o) and out.dtype == dtype
    assert (out.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


@pytest.mark.parametrize("pack", [pack_weight, lambda weight: weight], ids=["packed", "plain"])
def test_swiglu_of_a_product(pack):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in [(3, 16), (14, 16), (14,)])
    gate, up = (x @ weight.T + bias).chunk(2, dim=-1)
    assert torch.allclose(linear_swiglu(x, pack(weight), bias), F.silu(gate) * up, atol=1e-5)


def test_float32_is_packed_here():
    """Fails where this build lost the packed product: the CPU speed of the engine rests on it."""
    assert cpu.can_pack(torch.zeros(4, 4)) == torch.backends.mkldnn.is_available()


@pytest.mark.parametrize(("few_rows", "nbytes", "is_kept"), [(2, 64, True), (2, 63, False), (0, 64, False)])
def test_a_small_weight_is_kept_plain_where_few_rows_gain(few_rows, nbytes, is_kept, monkeypatch):
    monkeypatch.setattr(cpu, "FEW_ROWS", few_rows)
    monkeypatch.setattr(cpu, "SMALL_NBYTES", nbytes)
    weight = pack_weight(torch.ones(4, 4))
    assert isinstance(weight, cpu.PackedWeight) and (weight.plain is not None) == is_kept


def test_unsupported_weights_stay_as_they_are():
    for weight in (torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, device="meta")):
        assert pack_weight(weight) is weight


def test_packing_frees_the_original_and_keeps_a_shared_one():
    table = torch.nn.Parameter(torch.randn(6, 5), requires_grad=False)
    layer = Linear(5, {"lm_head": 6}, bias=False)
    layer.weight = table
    x = torch.randn(3, 5)
    expected = F.linear(x, table)
    layer.pack()
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert not list(layer.parameters()) or layer.weight is table
    assert table.shape == (6, 5) and torch.allclose(F.linear(x, table), expected)


@pytest.mark.parametrize(("rows", "computed"), [([2, 7, 2], 3), ([0, 1, 2, 3, 4], 9)])
def test_features_of_some_rows_alone(rows, computed, monkeypatch):
    """The others have the rest of the features; where most rows are asked for, all are computed."""
    seen = list[int]()

    def count(x, weight, bias=None):
        seen.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(layers, "linear", count)
    layer, x = Linear(5, {"q_proj": 6, "k_proj": 4}, bias=False), torch.randn(9, 5)
    layer.weight.data.normal_()
    with torch.no_grad():
        found, expected = layer.forward_partly(x, torch.tensor(rows), 6), x @ layer.weight.T
    assert torch.allclose(found[:, 6:], expected[:, 6:], atol=1e-5)
    assert torch.allclose(found[rows], expected[rows], atol=1e-5)
    assert seen == [computed]


class Rows(NamedTuple):
    """As a norm gives them to products of 8-bit floats."""

    codes: torch.Tensor
    scales: torch.Tensor


@pytest.mark.parametrize("rows", [None, torch.tensor([1])])
def test_a_quantized_weight_gives_all_features(rows, monkeypatch):
    monkeypatch.setattr(layers, "linear", lambda x, weight, bias: torch.ones(len(x.codes), 10))
    layer = Linear(5, {"q_proj": 6, "k_proj": 4}, bias=False)
    layer.hold("weight", object())
    assert torch.equal(layer.forward_partly(Rows(torch.zeros(9, 5), torch.zeros(9, 1)), rows, 6), torch.ones(9, 10))


@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
def test_norm_equals_its_definition(size, scale):
    norm = RMSNorm("norm", size, 1e-6)
    norm.weight.copy_(torch.linspace(-1, 2, size))
    norm.pack()
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0)) * scale
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x, None)[0].double(), expected, rtol=1e-5, atol=1e-7)


def test_norm_of_half_precision_rounds_like_transformers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm("norm", 96, 1e-5).bfloat16(), LlamaRMSNorm(96, 1e-5).bfloat16()
    weight = torch.linspace(0.5, 2, 96).bfloat16()
    ours.weight.copy_(weight)
    theirs.weight.data.copy_(weight)
    x = torch.randn(7, 96).bfloat16()
    assert torch.equal(ours(x, None)[0], theirs(x).detach())


def test_batches_are_padded_to_few_sizes():
    cpu = torch.device("cpu")
    sizes = {padded_rows(n, cpu) for n in range(1, 2049)}
    assert len(sizes) <= 32 and all(padded_rows(n, cpu) >= n for n in range(1, 2049))
    assert all(padded_rows(n, cpu) == n for n in (1, 2, 3, 4, 8, 32, 128, 256, 512, 2048))
    assert padded_rows(37, torch.device("cuda")) == 37
