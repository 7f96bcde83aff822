"""Plain checkpoints that are quantized while they are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkv_engine import Engine
from qkv_engine.errors import ConfigError
from qkv_engine.kernels.linear import IntegerWeight, dequantize
from qkv_engine.loading import with_weights
from qkv_engine.models import loader
from qkv_engine.models.loader import find_model, load_weights, weights_nbytes
from qkv_engine.models.weights.loading import quantized_layers
from qkv_engine.models.weights.on_load import OnLoad

from ..conftest import CPU
from .peaks import load_peak, write_ones
from .writers import FORMS, quantize

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
BOUNDS = {"int8": 0.008, "int4": 0.12, "fp8": 0.03}  # relative errors of normal values


@pytest.mark.parametrize("kind", BOUNDS)
def test_errors_are_those_of_rounding(kind):
    weight = torch.randn(5000, 256, generator=torch.Generator().manual_seed(0))
    built = OnLoad(kind).build({"weight": weight}, torch.float32)
    assert (dequantize(built, torch.float32) - weight).norm() < BOUNDS[kind] * weight.norm()
    empty = OnLoad(kind).empty(5000, 256, torch.float32)
    assert [part.shape for part in built if part is not None] == [part.shape for part in empty if part is not None]


def test_values_on_the_grid_are_kept():
    """Largest code 7 times 0.5: no clip makes the error smaller. An outlier of a group is clipped for the others."""
    row = torch.arange(128).remainder(15).sub(7).mul(0.5)
    weight = OnLoad("int4").build({"weight": row[None]}, torch.float32)
    assert isinstance(weight, IntegerWeight) and weight.scales.tolist() == [[0.5]]
    assert torch.equal(dequantize(weight, torch.float32), row[None])
    wild = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    wild[0, 0] = 5.0
    clipped = OnLoad("int4").build({"weight": wild}, torch.float32)
    assert float(clipped.scales) < 5.0 / 7


@pytest.mark.parametrize(("columns", "bits", "group"), [(256, 4, 128), (704, 4, 64), (96, 4, 32), (100, 8, 100)])
def test_groups_divide_the_columns(columns, bits, group):
    weight = OnLoad("int4").empty(3, columns, torch.float32)
    assert (weight.bits, weight.group) == (bits, group)


@pytest.mark.parametrize("kind", BOUNDS)
def test_codes_and_unpacked_weights_agree(kind, tiny_folder, logits_of, monkeypatch):
    found = find_model(str(tiny_folder))
    source = replace(found, config=with_weights(found.config, kind))
    unpacked = load_weights(source, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    kept = load_weights(source, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(logits_of(kept, IDS), logits_of(unpacked, IDS), rtol=1e-3, atol=1e-4)
    head = kept.model.lm_head.weight
    assert not isinstance(head, IntegerWeight) or head.bits == 8
    assert weights_nbytes(source.config, torch.float32) < weights_nbytes(found.config, torch.float32)


def test_what_is_quantized_is_not_quantized_again(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"weights='int3'.*int8, int4, fp8"):
        Engine(weights="int3")
    quantize(tiny_folder, tmp_path / "model", FORMS["int8 channel"])
    with pytest.raises(ConfigError, match=r"quantized itself \(compressed-tensors\)"):
        Engine(tmp_path / "model", weights="int8")


@pytest.mark.parametrize("kind", BOUNDS)
def test_random_weights_are_those_of_the_seed_quantized(kind, tiny_folder, monkeypatch):
    found = find_model(str(tiny_folder), load_format="random")
    options = {"dtype": torch.float32, "device": CPU, "load_format": "random", "seed": 7}
    plain = load_weights(found, pack=False, **options).model
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    kept = load_weights(replace(found, config=with_weights(found.config, kind)), **options).model
    layers = dict(quantized_layers(kept))
    assert len(layers) >= 8
    for path, layer in layers.items():
        values = dequantize(
            layer.format.build({"weight": plain.get_submodule(path).weight}, torch.float32), torch.float32
        )
        assert torch.equal(dequantize(layer.weight, torch.float32), values)
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))


@pytest.mark.parametrize("load_format", ["auto", pytest.param("random", marks=pytest.mark.slow)])
def test_memory_stays_near_the_quantized_size(load_format, tmp_path):
    """Peak of a load that keeps codes: at most their size and a layer and a half."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, vocab_size=512
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    write_ones(tmp_path)
    peak, quantized = load_peak(tmp_path, "int8", load_format)
    layer = (4 * 1024**2 + 3 * 1024 * 4096) * 2 / 2**20
    assert quantized > 60 and peak < quantized + 1.5 * layer
