"""Experts of plain checkpoints and of random weights, quantized while they are read or made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine import Engine, SamplingParams
from qkv_engine.kernels.linear import Float8Weight, IntegerWeight, dequantize
from qkv_engine.kernels.moe import CodedExperts
from qkv_engine.loading import with_weights
from qkv_engine.models import loader
from qkv_engine.models.loader import find_model, load_nbytes, load_weights, weights_nbytes
from qkv_engine.models.moe import MoE
from qkv_engine.models.ranks import Ranks
from qkv_engine.models.registry import build_model
from qkv_engine.models.weights.on_load import OnLoad

from ..conftest import CPU, config_class
from .loads import bar_of
from .peaks import load_peak, write_ones
from .ranks import logits_on_ranks
from .sizes import held_nbytes
from .test_experts import EXPERTS, FAMILIES, SHAPE
from .writers import unstack

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
KINDS = ("int8", "int4", "fp8")
STACKED = "Qwen3_5Moe, stacked"


@pytest.fixture(scope="module")
def sources(make_reference, tmp_path_factory):
    """Plain checkpoints by family."""
    found = {}

    def source(family):
        if family not in found:
            found[family], name = tmp_path_factory.mktemp("source"), family.partition(",")[0]
            make_reference(name, **SHAPE, **EXPERTS | FAMILIES[name]).save_pretrained(found[family])
            if family == "Qwen3_5Moe":
                unstack(found[family])
        return found[family]

    return source


def moes(net: Any) -> list[MoE]:
    return [each for each in net.modules() if isinstance(each, MoE)]


def load_as(folder: Any, kind: str | None, **options: Any) -> Any:
    found = find_model(str(folder), load_format=options.get("load_format", "auto"))
    source = replace(found, config=with_weights(found.config, kind))
    return load_weights(source, dtype=torch.float32, device=CPU, **options)


def values(each: Tensor | CodedExperts) -> Tensor:
    return each if isinstance(each, Tensor) else each.dequantize(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*FAMILIES, STACKED])
def test_experts_are_those_of_the_plain_ones_quantized(family, kind, sources, logits_of, monkeypatch):
    plain, unpacked = load_as(sources(family), None), load_as(sources(family), kind)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    monkeypatch.setattr(loader, "pack_weight", lambda weight: weight)  # copies of the CPU's
    kept = load_as(sources(family), kind)
    for before, wide, moe in zip(*(moes(each.model) for each in (plain, unpacked, kept)), strict=True):
        assert torch.equal(moe.router, before.router)
        for name in ("gate_up", "down"):
            weight, matrices = getattr(moe, name), getattr(before, name)
            assert isinstance(weight, CodedExperts) and isinstance(weight.weight, IntegerWeight | Float8Weight)
            for expert, matrix in enumerate(matrices):
                expected = dequantize(OnLoad(kind).build({"weight": matrix}, torch.float32), torch.float32)
                assert not torch.equal(expected, matrix)
                assert torch.equal(values(weight)[expert], expected)
                assert torch.equal(getattr(wide, name)[expert], expected)
    torch.testing.assert_close(logits_of(kept, IDS), logits_of(unpacked, IDS), rtol=1e-3, atol=1e-4)
    assert (
        weights_nbytes(kept.config, torch.float32)
        == held_nbytes(kept.model)
        < weights_nbytes(plain.config, torch.float32)
    )


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "GraniteMoeShared"])
def test_a_step_and_a_device_count_stacked_experts(family, sources):
    """A tensor of all experts is plain on the device, a matrix of a layer at a time."""
    config = with_weights(find_model(str(sources(family))).config, "int8")
    net, kept = build_model(config), weights_nbytes(config, torch.float32)
    matrix = max(moe.gate_up.numel() for moe in moes(net)) * 4
    gpu = torch.device("cuda")
    assert load_nbytes(config, torch.float32, gpu) - kept == (0 if family == "Qwen3Moe" else matrix)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_random_experts_are_those_of_the_seed_quantized(family, kind, sources, monkeypatch):
    options = {"load_format": "random", "seed": 7}
    plain = load_as(sources(family), None, pack=False, **options)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    kept = load_as(sources(family), kind, **options)
    for before, moe in zip(moes(plain.model), moes(kept.model), strict=True):
        for name in ("gate_up", "down"):
            matrix = getattr(before, name).flatten(0, 1)
            expected = dequantize(OnLoad(kind).build({"weight": matrix}, torch.float32), torch.float32)
            assert torch.equal(values(getattr(moe, name)).flatten(0, 1), expected)
    for name, parameter in kept.model.named_parameters():
        assert torch.equal(parameter, plain.model.get_parameter(name))


@pytest.mark.parametrize("is_unpacked", [True, False])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "GraniteMoeShared", STACKED])
def test_two_ranks_compute_the_logits_of_one(family, is_unpacked, sources, monkeypatch):
    """By columns a part of a row has a scale of its own: near, not equal."""
    monkeypatch.setattr(loader, "is_unpacked", lambda device: is_unpacked)
    found = loader.find_model
    as_int8 = lambda name: replace(found(name), config=with_weights(found(name).config, "int8"))  # noqa: E731
    monkeypatch.setattr("tests.models.weights.ranks.find_model", as_int8)
    (expected,) = logits_on_ranks(sources(family), 1)
    for logits in logits_on_ranks(sources(family), 2):
        assert (logits - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", STACKED])
def test_the_bar_counts_all_that_is_read(family, num_ranks, sources, monkeypatch):
    ranks = Ranks(num_ranks - 1, num_ranks)
    total, read = bar_of(lambda: load_as(sources(family), "int8", ranks=ranks), monkeypatch)
    assert read == total > 0


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_an_engine_generates_with_quantized_experts(family, sources, monkeypatch):
    params, tokens = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), []
    for is_unpacked in (True, False):
        monkeypatch.setattr(loader, "is_unpacked", lambda device, is_unpacked=is_unpacked: is_unpacked)
        options = {"kv": "fp32", "kv_memory": "8MiB", "device": "cpu", "max_model_len": 128}
        with Engine(sources(family), weights="int4", **options) as engine:
            tokens.append(engine.generate([IDS.tolist()], params)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "load_format"),
    [
        ("Qwen3Moe", "auto"),
        pytest.param("Qwen3Moe", "random", marks=slow),
        pytest.param("GraniteMoe", "auto", marks=slow),
        pytest.param("GptOss", "auto", marks=slow),
        pytest.param("GptOss", "random", marks=slow),
    ],
)
def test_memory_stays_near_the_quantized_size(family, load_format, tmp_path):
    """Peak of a load that keeps codes: at most their size and a layer and a half."""
    hidden, inner, number, layers = 512, 512, 24, 5
    shape = SHAPE | {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": 512, "head_dim": 128}
    sizes = {"num_experts": number, "num_local_experts": number}
    sizes |= {"moe_intermediate_size": inner, "intermediate_size": inner}
    config = config_class(family)(**shape, **sizes)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    write_ones(tmp_path)
    peak, quantized = load_peak(tmp_path, "int8", load_format)
    layer = (4 * hidden**2 + 3 * number * hidden * inner) * 2 / 2**20
    assert quantized > layer * layers / 2 and peak < quantized + 1.5 * layer
