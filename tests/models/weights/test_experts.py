"""Experts in quantized checkpoints, and quantized on load: values, tokens, ranks, refusals, bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv_engine.bench.roofline import count_weights
from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import weight_nbytes
from qkv_engine.kernels.moe import CodedExperts
from qkv_engine.models import loader
from qkv_engine.models.loader import find_model, load_nbytes, num_parameters, weights_nbytes
from qkv_engine.models.moe import MoE
from qkv_engine.models.qwen3_5 import SharedMoE
from qkv_engine.models.registry import build_model
from qkv_engine.models.weights.loading import quantized_tensors
from qkv_engine.models.weights.plain import PLAIN

from .loads import check_tokens
from .ranks import check_two_ranks, logits_on_ranks
from .sizes import held_nbytes
from .writers import FORMS, quantize, unstack

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 128, "intermediate_size": 128}
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 32, "norm_topk_prob": True},
    "Mixtral": {"head_dim": 32},
    "Olmoe": {"pad_token_id": 0, "head_dim": 32},
    "Qwen3_5Moe": STATES | {"head_dim": 128},  # whole blocks
    "Qwen3Next": STATES | {"head_dim": 32},
    "GraniteMoeShared": {"shared_intermediate_size": 128},
    "GptOss": {"head_dim": 32},
}
GATES = ("shared_expert_gate", "linear_attn")  # what is left plain; routers are not listed
READ = [name for name in FORMS if name != "gptq act-order"]


@pytest.fixture(scope="module")
def sources(make_reference, tmp_path_factory):
    """Plain checkpoints by family; Qwen3.5 has tensors of each expert."""
    found = {}

    def source(family, **changes):
        key = family, *changes.items()
        if key not in found:
            found[key] = tmp_path_factory.mktemp(family)
            make_reference(family, **SHAPE, **EXPERTS | FAMILIES[family] | changes).save_pretrained(found[key])
            if family == "Qwen3_5Moe":
                unstack(found[key])
        return found[key]

    return source


def coded(net) -> list[CodedExperts]:
    """The experts' matrices that are codes."""
    found = [each for moe in net.modules() if isinstance(moe, MoE) for each in (moe.gate_up, moe.down)]
    return [each for each in found if isinstance(each, CodedExperts)]


@pytest.mark.parametrize("name", READ)
def test_values_are_those_of_the_unpacked_experts(name, sources, tmp_path, load, logits_of, monkeypatch):
    plain = quantize(sources("Qwen3Moe"), tmp_path / "model", FORMS[name], left=GATES)
    expected = logits_of(load(plain), IDS)
    assert torch.equal(logits_of(load(tmp_path / "model"), IDS), expected)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    monkeypatch.setattr(loader, "pack_weight", lambda weight: weight)  # copies of the CPU's
    kept = load(tmp_path / "model")
    torch.testing.assert_close(logits_of(kept, IDS), expected, rtol=1e-3, atol=1e-4)
    assert len(coded(kept.model)) == (2 if "ignore" in FORMS[name].config else 4)
    assert weights_nbytes(kept.config, torch.float32) == held_nbytes(kept.model) < 4 * num_parameters(kept.config)
    counted = count_weights(kept.config, torch.float32)
    experts = [each for moe in kept.model.modules() if isinstance(moe, MoE) for each in (moe.gate_up, moe.down)]
    assert counted.nbytes == held_nbytes(kept.model) == load_nbytes(kept.config, torch.float32, torch.device("cuda"))
    assert counted.expert_nbytes == sum(
        weight_nbytes(each.weight) if isinstance(each, CodedExperts) else each.nbytes for each in experts
    )
    assert counted.multiplied == count_weights(load(plain).config, torch.float32).multiplied


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("Qwen3Moe", "gptq zeros"),
        ("Mixtral", "awq"),
        ("Olmoe", "gptq"),
        ("Qwen3_5Moe", "fp8 blocks"),
        ("Qwen3Next", "int8 channel"),
    ],
)
def test_greedy_tokens_are_those_of_the_unpacked_experts(family, form, sources, tmp_path, monkeypatch):
    plain = quantize(sources(family), tmp_path / "model", FORMS[form], left=GATES)
    first, second = check_tokens(plain, tmp_path / "model", IDS.tolist(), 30, monkeypatch)
    assert len({*first, *second}) > 4


@pytest.mark.parametrize("is_unpacked", [True, False])
@pytest.mark.parametrize("name", ["int4 zeros", "awq", "gptq zeros", "fp8"])
def test_ranks_have_parts_of_every_expert(name, is_unpacked, sources, tmp_path, monkeypatch):
    quantize(sources("Qwen3Moe"), tmp_path / "model", FORMS[name], left=GATES)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: is_unpacked)
    check_two_ranks(tmp_path / "model")


def test_parts_of_blocks_are_refused_by_name(sources, tmp_path, load, monkeypatch):
    """Two ranks would have half a block of an expert; an expert of a block and a half cannot stand beside another."""
    form, left = FORMS["fp8 blocks"], ("self_attn",)
    quantize(sources("Qwen3Moe"), tmp_path / "model", form, left=left)
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj\.weight_scale_inv cannot be split over the ranks"):
        logits_on_ranks(tmp_path / "model", 2)
    quantize(sources("Qwen3Moe", moe_intermediate_size=192), tmp_path / "odd", form, left=left)
    load(tmp_path / "odd")
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.0\.up_proj cannot stand in one matrix"):
        load(tmp_path / "odd")


def test_columns_must_be_whole_groups(sources, tmp_path):
    contents = json.loads((sources("Qwen3Moe") / "config.json").read_text())
    config = contents | {"moe_intermediate_size": 120, "quantization_config": FORMS["gptq"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"0\.down_proj\.qzeros: 120 columns are no whole number of blocks of 32"):
        list(quantized_tensors(build_model(find_model(str(tmp_path)).config)))


@pytest.mark.parametrize("form", ["int4 zeros", "fp8"])
def test_a_shared_mlp_is_quantized_beside_plain_experts(form, sources, tmp_path, load, logits_of):
    plain = quantize(sources("GraniteMoeShared"), tmp_path / "model", FORMS[form], left=("block_sparse_moe",))
    loaded = load(tmp_path / "model")
    assert torch.equal(logits_of(loaded, IDS), logits_of(load(plain), IDS))
    layer = loaded.model.model.layers[0]
    assert layer.mlp.format is PLAIN and PLAIN not in {each.format for each in layer.shared_mlp.children()}


def _ignoring(name: str, *words: str) -> dict[str, Any]:
    config = FORMS[name].config
    key = "ignore" if "ignore" in config else "modules_to_not_convert"
    return config | {key: [*config.get(key, []), *words]}


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("Qwen3Moe", FORMS["gptq act-order"].config, r"layers\.0\.mlp\.experts\.0\.gate_proj.*order of columns"),
        ("Qwen3Moe", _ignoring("awq", "experts.1.up_proj"), r"experts\.1\.up_proj.* different formats"),
        ("Olmoe", _ignoring("int4", "re:.*experts.2.*"), r"experts\.2\.gate_proj.* different formats"),
        ("GraniteMoeShared", FORMS["awq"].config, r"input_linear: experts whose matrices are one tensor.*AWQ"),
        ("GptOss", FORMS["fp8"].config, r"experts\.gate_up_proj: experts whose matrices are one tensor.*fp8"),
        ("Qwen3_5Moe", {"quant_method": "mxfp4"}, r"experts with tensors of their own are not supported in MXFP4"),
    ],
)
def test_what_is_not_read_is_refused_before_weights_are(family, config, message, sources, tmp_path):
    contents = json.loads((sources(family) / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    found = find_model(str(tmp_path)).config
    with pytest.raises(ModelError, match=f"(?s){message}"):
        weights_nbytes(found, torch.float32)


def test_stacked_experts_of_qwen3_5_are_refused_by_name(sources, tmp_path, load):
    quantize(sources("Qwen3_5Moe"), tmp_path / "model", FORMS["awq"], left=GATES)
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.mlp.experts.gate_up_proj_packed": torch.zeros(3, 2, 2)}, path)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj_packed: stacked experts.*AWQ"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("family", "form", "end"),
    [("Qwen3Moe", "gptq", "qweight"), ("Qwen3Moe", "fp8", "weight"), ("Mixtral", "int4", "weight_packed")],
)
def test_a_quantized_router_is_refused_by_name(family, form, end, sources, tmp_path, load):
    """Whatever its config.json lists: some tools quantize what chooses experts."""
    quantize(sources(family), tmp_path / "model", FORMS[form], left=GATES)
    path = tmp_path / "model" / "model.safetensors"
    tensors, name = load_file(path), f"model.layers.1.{'mlp' if family == 'Qwen3Moe' else 'block_sparse_moe'}.gate"
    found, _ = FORMS[form].write(tensors.pop(f"{name}.weight").repeat(8, 1))
    assert end in found
    save_file(tensors | {f"{name}.{key}": each.contiguous() for key, each in found.items()}, path)
    with pytest.raises(ModelError, match=rf"{name}, which chooses experts, is quantized"):
        load(tmp_path / "model")


def test_a_missing_tensor_of_an_expert_is_named(sources, tmp_path, load):
    quantize(sources("Qwen3Moe"), tmp_path / "model", FORMS["gptq"])
    path, tensors = tmp_path / "model" / "model.safetensors", load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.scales"
    save_file({key: each for key, each in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=rf"lack {name}"):
        load(tmp_path / "model")
    zeros = {"model.layers.1.mlp.experts.2.down_proj.bias": torch.zeros(128)}
    save_file(tensors | zeros, path)
    load(tmp_path / "model")
    save_file(tensors | {key: each + 1 for key, each in zeros.items()}, path)
    with pytest.raises(ModelError, match=r"experts\.2\.down_proj\.bias is not zero"):
        load(tmp_path / "model")


@pytest.mark.parametrize(("family", "form"), [("Qwen3Next", "int4"), ("Qwen3_5Moe", "int8 group")])
def test_shared_experts_have_formats_like_other_layers(family, form, sources, tmp_path):
    config, words = json.loads((sources(family) / "config.json").read_text()), (f"re:.*{word}$" for word in GATES)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"quantization_config": _ignoring(form, *words)}))
    net = build_model(find_model(str(tmp_path)).config)
    moes = [each for each in net.modules() if isinstance(each, SharedMoE)]
    formats = [each.format for each in moes]
    assert len(moes) == 2 and {each.shared_gate.format for each in moes} == {PLAIN} != {*formats}
    assert [each.shared_expert.down_proj.format for each in moes] == formats
