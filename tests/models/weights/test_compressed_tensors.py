"""Checkpoints that the package ``compressed-tensors`` writes are read as the package itself unpacks them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized

from qkv_engine.models.weights.plain import PLAIN

from .test_checkpoints import SHAPE

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
GROUP, BLOCK = 32, 128
SCHEMES: dict[str, dict[str, Any]] = {
    "int4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
    "int4-group-zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
    "int4-channel": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
    "int8-group": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "float8-channel": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "float8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
FORMS: dict[str, tuple[str, dict[str, Any] | None]] = {  # the weights' scheme, and the inputs'
    **{name: (name, None) for name in SCHEMES},
    "int8 and inputs": ("int8-channel", TOKENS | {"type": "int"}),
    "float8 and inputs": ("float8-channel", TOKENS | {"type": "float"}),
}


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and greatest value of each group, channel, block, or of the tensor, in the scales' shape."""
    rows, columns = weight.shape
    if args.strategy == "block":
        parts = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        return parts.amin((1, 3)), parts.amax((1, 3))
    if args.strategy == "tensor":
        return weight.amin().view(1), weight.amax().view(1)
    parts = weight.view(rows, -1, GROUP) if args.strategy == "group" else weight[:, None]
    return parts.amin(2), parts.amax(2)


def quantize(model: transformers.PreTrainedModel, folder: Path, weights: dict[str, Any], inputs: Any) -> Any:
    """Writes ``model`` as the package does; returns it with the weights that the package unpacks again."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head", "re:.*layers\\.1\\.mlp.*"])
    apply_quantization_config(model, config)
    for module in filter(is_module_quantized, model.modules()):
        args = module.quantization_scheme.weights
        scale, zero = calculate_qparams(*extremes(module.weight.detach(), args), args)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write(model, folder, tensors)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return model


def write(model: transformers.PreTrainedModel, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Tensors under the names that they have in ``model``."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def with_linear_experts(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """``model`` with a linear layer for each matrix of its experts, as it must be for the package to quantize them."""
    for layer in model.model.layers:
        stacked, experts = layer.mlp.experts, nn.ModuleList()
        for gate_up, down in zip(stacked.gate_up_proj.detach(), stacked.down_proj.detach(), strict=True):
            matrices = dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True))
            expert = nn.ModuleDict({name: nn.Linear(*each.shape[::-1], bias=False) for name, each in matrices.items()})
            expert.load_state_dict({f"{name}.weight": each for name, each in matrices.items()})
            experts.append(expert)
        layer.mlp.experts = experts
    return model


@pytest.mark.parametrize("name", ["int4-group-zeros", "int8-channel", "float8-block"])
def test_values_of_experts_are_those_that_the_package_unpacks(name, make_reference, tmp_path, load, logits_of):
    shape = SHAPE | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    reference = with_linear_experts(make_reference("Qwen3Moe", **shape, head_dim=32))
    names = set(reference.state_dict())
    unpacked = quantize(reference, tmp_path / "model", SCHEMES[name], None)
    write(unpacked, tmp_path / "plain", {k: v for k, v in unpacked.state_dict().items() if k in names})
    found, expected = (load(tmp_path / folder) for folder in ("model", "plain"))
    assert found.model.model.layers[0].mlp.format is not PLAIN
    torch.testing.assert_close(logits_of(found, IDS), logits_of(expected, IDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_that_the_package_unpacks(name, make_reference, tmp_path, load, logits_of):
    scheme, inputs = FORMS[name]
    reference = make_reference("Llama", **SHAPE, head_dim=32)
    before = copy.deepcopy(reference)
    unpacked = quantize(reference, tmp_path / "model", SCHEMES[scheme], inputs)
    stored = {k: v for k, v in unpacked.state_dict().items() if k in before.state_dict()}
    assert any(not torch.equal(v, before.state_dict()[k]) for k, v in stored.items())
    before.load_state_dict(stored)
    before.save_pretrained(tmp_path / "plain")
    found, expected = (logits_of(load(tmp_path / folder), IDS) for folder in ("model", "plain"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
