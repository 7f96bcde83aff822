"""Quantized checkpoints give what their values in float32 give, unpacked at load and as codes, alone and on ranks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from qkv_engine.bench.roofline import count_weights
from qkv_engine.bench.sizing import Machine, kv_nbytes
from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import Float8Weight, IntegerWeight, weight_nbytes
from qkv_engine.models import loader
from qkv_engine.models.checkpoint import weights_digest
from qkv_engine.models.loader import find_model, load_weights, num_parameters, weights_nbytes
from qkv_engine.models.ranks import Ranks
from qkv_engine.models.weights.awq import Awq
from qkv_engine.models.weights.codes import unpack_words
from qkv_engine.models.weights.loading import UNUSED, quantized_layers

from ..conftest import CPU
from .loads import bar_of, check_tokens
from .ranks import check_two_ranks, logits_on_ranks
from .writers import FORMS, quantize

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def source(make_reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    make_reference("Llama", **SHAPE, head_dim=32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_the_unpacked_weights(name, source, tmp_path, load, logits_of):
    plain = quantize(source, tmp_path / "model", FORMS[name])
    assert torch.equal(logits_of(load(tmp_path / "model"), IDS), logits_of(load(plain), IDS))


@pytest.mark.parametrize("name", FORMS)
def test_codes_are_kept_where_they_are_multiplied(name, source, tmp_path, load, logits_of, monkeypatch):
    plain = quantize(source, tmp_path / "model", FORMS[name])
    expected = logits_of(load(plain), IDS)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: False)
    loaded = load(tmp_path / "model")
    torch.testing.assert_close(logits_of(loaded, IDS), expected, rtol=1e-3, atol=1e-4)
    layers = [layer for _, layer in quantized_layers(loaded.model)]
    assert len(layers) == (6 if "ignore" in FORMS[name].config else 8)
    assert all(isinstance(layer.weight, (IntegerWeight, Float8Weight)) for layer in layers)
    counted = sum(
        layer.weight_nbytes(torch.float32) for _, layer in quantized_layers(loader.build_model(loaded.config))
    )
    assert counted == sum(weight_nbytes(layer.weight) for layer in layers)
    assert weights_nbytes(loaded.config, torch.float32) < 4 * num_parameters(loaded.config)


@pytest.mark.parametrize("is_unpacked", [True, False])
@pytest.mark.parametrize("name", ["int4 zeros", "int8 channel", "awq", "gptq zeros", "fp8"])
def test_ranks_have_parts_of_packed_tensors(name, is_unpacked, source, tmp_path, monkeypatch):
    quantize(source, tmp_path / "model", FORMS[name])
    monkeypatch.setattr(loader, "is_unpacked", lambda device: is_unpacked)
    check_two_ranks(tmp_path / "model")


@pytest.mark.parametrize("name", ["gptq act-order", "fp8 blocks"])
def test_parts_of_groups_are_refused_by_name(name, source, tmp_path):
    quantize(source, tmp_path / "model", FORMS[name])
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.\w_proj\.\w+ cannot be split over the ranks"):
        logits_on_ranks(tmp_path / "model", 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method='bitsandbytes'"),
        ({"quant_method": "modelopt"}, r"quant_method='modelopt'"),
        (FORMS["awq"].config | {"bits": 3}, r"bits=3"),
        (FORMS["awq"].config | {"version": "gemv"}, r"version='gemv'"),
        (FORMS["gptq"].config | {"bits": 2}, r"bits=2"),
        (FORMS["gptq"].config | {"checkpoint_format": "marlin"}, r"checkpoint_format='marlin'"),
        (FORMS["fp8 blocks"].config | {"weight_block_size": [1, 128]}, r"weight_block_size=\[1, 128\]"),
        (FORMS["int4"].config | {"format": "nvfp4-pack-quantized"}, r"format='nvfp4-pack-quantized'"),
        (FORMS["int4"].config | {"ignore": ["re:("]}, r"ignore"),
        (FORMS["gptq"].config | {"dynamic": {"re:x": {"bits": 8}}}, r"dynamic"),
        (FORMS["gptq"].config | {"dynamic": {"-:(": {}}}, r"dynamic"),
        (FORMS["gptq"].config | {"dynamic": ["-:x"]}, r"dynamic"),
        (FORMS["auto-round"].config | {"extra_config": {"model.layers.0.mlp": {"bits": 8}}}, r"extra_config"),
        (FORMS["int4"].config | {"config_groups": []}, r"config_groups"),
        (
            FORMS["int4"].config | {"ignore": ["q_proj", "lm_head"]},
            r"q_proj.*one matrix here and have different formats",
        ),
    ],
)
def test_what_is_not_supported_is_refused_before_weights_are_read(config, message, source, tmp_path, load):
    contents = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=f"(?s){message}"):
        loader.num_parameters(find_model(str(tmp_path)).config)
        weights_nbytes(find_model(str(tmp_path)).config, torch.float32)


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("gptq", {"dynamic": {"-:.*attn.*": {}, "lm_head": {}}}),
        ("auto-round", {"extra_config": {f"model.layers.{layer}.self_attn": {"bits": 16} for layer in range(2)}}),
    ],
)
def test_modules_that_are_left_plain(form, more, source, tmp_path, load, logits_of):
    plain = quantize(source, tmp_path / "model", FORMS[form], left=("self_attn",))
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FORMS[form].config | more}))
    assert torch.equal(logits_of(load(tmp_path / "model"), IDS), logits_of(load(plain), IDS))


@pytest.mark.parametrize("name", ["gptq", "gptq act-order"])
def test_biases_of_old_files_must_be_zero(name, source, tmp_path, load, logits_of):
    """AutoGPTQ wrote zeros of layers that have no bias."""
    plain = quantize(source, tmp_path / "model", FORMS[name])
    path, bias = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.bias"
    tensors = load_file(path)
    zeros = {end.replace("qweight", "bias"): torch.zeros(x.shape[1]) for end, x in tensors.items() if "qweight" in end}
    save_file(tensors | zeros, path)
    assert torch.equal(logits_of(load(tmp_path / "model"), IDS), logits_of(load(plain), IDS))
    zeros[bias][-1] = 1e-3
    save_file(tensors | zeros, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.bias is not zero"):
        load(tmp_path / "model")
    save_file(tensors | {bias: torch.zeros(3)}, path)
    with pytest.raises(ModelError, match=r"have model\.layers\.1\.mlp\.up_proj\.bias"):
        load(tmp_path / "model")


@pytest.mark.parametrize("name", ["int4 zeros", "int8 group", "fp8", "fp8 blocks", "fbgemm", "awq", "gptq act-order"])
def test_the_digest_samples_codes_scales_and_zeros(name, source, tmp_path):
    quantize(source, tmp_path / "model", FORMS[name])
    path, digests = tmp_path / "model" / "model.safetensors", {weights_digest(tmp_path / "model")}
    tensors = load_file(path)
    ends = [end for end in tensors if "layers.0.self_attn.k_proj" in end and not end.endswith(UNUSED)]
    for end in ends:
        changed = tensors[end].clone()
        changed.view(-1).view(torch.uint8)[1] ^= 1
        save_file(tensors | {end: changed}, path)
        digests.add(weights_digest(tmp_path / "model"))
    assert len(digests) == 1 + len(ends) >= 3


@pytest.mark.parametrize("name", ["awq", "gptq act-order", "fp8 blocks"])
def test_greedy_tokens_are_those_of_the_unpacked_weights(name, source, tmp_path, monkeypatch):
    plain = quantize(source, tmp_path / "model", FORMS[name])
    first, second = check_tokens(plain, tmp_path / "model", IDS.tolist(), 40, monkeypatch)
    assert len({*first, *second}) > 4


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["int4 zeros", "int8 channel", "awq", "gptq", "fp8"])
def test_the_bar_counts_all_that_is_read(name, num_ranks, source, tmp_path, monkeypatch):
    quantize(source, tmp_path / "model", FORMS[name])
    found, ranks = find_model(str(tmp_path / "model")), Ranks(num_ranks - 1, num_ranks)
    total, read = bar_of(lambda: load_weights(found, dtype=torch.float32, device=CPU, ranks=ranks), monkeypatch)
    codes = sum(x.nbytes for end, x in load_file(tmp_path / "model" / "model.safetensors").items() if "_proj" in end)
    assert read == total > 0.9 * codes / num_ranks


def test_weights_count_as_a_device_keeps_them(source, tmp_path):
    quantize(source, tmp_path / "model", FORMS["awq"])
    config = find_model(str(tmp_path / "model")).config
    kept, unpacked = (count_weights(config, torch.float32, device) for device in (None, CPU))
    assert unpacked.nbytes == 4 * num_parameters(config) == weights_nbytes(config, torch.float32, device=CPU)
    assert kept.nbytes == weights_nbytes(config, torch.float32) < unpacked.nbytes / 2
    assert kept.multiplied == unpacked.multiplied
    machine = Machine(config, torch.float32, CPU)
    assert kv_nbytes(machine, "64MiB", None, 100) == 64 * 2**20 - unpacked.nbytes


def test_words_are_read_as_public_readers_do():
    """compressed-tensors and GPTQ: 0x76543210 is 0 to 7; AutoAWQ packs rows 0 2 4 6 1 3 5 7 into places 0 to 7."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_words(word, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack_words(word, 8).tolist() == [[0x10, 0x32, 0x54, 0x76]]
    word = torch.tensor([[0x75316420]], dtype=torch.int32)  # place 0 has row 0, place 1 row 2, place 4 row 1
    ones = {"qweight": word.repeat(2, 1), "qzeros": torch.full((1, 1), 0x11111111), "scales": torch.ones(1, 8)}
    weight = Awq(2).build(ones | {"qzeros": ones["qzeros"].int()}, torch.float32)
    assert weight.codes[:, 0].tolist() == [row * 17 for row in range(8)]
    assert weight.zeros is not None and weight.zeros.flatten().tolist() == [1] * 8
