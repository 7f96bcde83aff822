"""gpt-oss with experts in MXFP4: values by hand and of transformers, what is refused, ranks, tokens, and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import dequantize
from qkv_engine.models import loader
from qkv_engine.models.loader import weights_nbytes
from qkv_engine.models.weights.mxfp4 import Mxfp4

from ..conftest import CPU
from .loads import check_tokens
from .peaks import load_peak
from .ranks import check_two_ranks, logits_on_ranks
from .sizes import held_nbytes

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
SHAPE = {"intermediate_size": 64, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def packed(num_experts: int, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random blocks and scales of experts, and their values [X, rows, columns], by a loop over the values."""
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), generator=draw)
    scales = torch.randint(121, 125, blocks.shape[:3], generator=draw)
    values = []
    for row, exponent in zip(blocks.view(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
        values += [VALUES[code] * 2.0 ** (exponent - 127) for byte in row for code in (byte & 15, byte >> 4)]
    found = {"blocks": blocks.to(torch.uint8), "scales": scales.to(torch.uint8)}
    return found, torch.tensor(values).view(num_experts, rows, columns)


def write(source: Path, folder: Path, *, left_out: str | None = None) -> Path:
    """The model of ``source`` with other experts, in MXFP4; returns a folder beside it with their values."""
    plain = folder.with_name(folder.name + "-plain")
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "model.safetensors")
    values = dict(stored)
    for seed, name in enumerate(sorted(stored)):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            number, columns, rows = stored[name].shape
            found, floats = packed(number, rows, columns, seed)
            values[name] = floats.mT.contiguous()
            if left_out is None or not name.startswith(left_out):
                del stored[name]
                stored |= {f"{name}_{end}": each for end, each in found.items()}
            else:
                stored[name] = values[name]
    quantization = CONFIG | ({"modules_to_not_convert": [left_out]} if left_out else {})
    for path, contents, more in ((folder, stored, {"quantization_config": quantization}), (plain, values, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | more))
        save_file(contents, path / "model.safetensors")
    return plain


@pytest.fixture
def source(make_reference, tmp_path):
    make_reference("GptOss", **SHAPE).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_values_by_hand():
    """Codes 0 to 15, low half first, then 2s (code 4); scales of 1, 4, the smallest and 2^100."""
    row = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0x44] * 8]
    found = {"blocks": torch.tensor([[row, row], [row, row]], dtype=torch.uint8)}
    found["scales"] = torch.tensor([[127, 129], [0, 227]], dtype=torch.uint8)
    weight = dequantize(Mxfp4().build(found, torch.float32), torch.float32)
    once = torch.tensor([*VALUES, *[2.0] * 16])
    assert torch.equal(weight[0], torch.cat((once, once * 4)))
    assert torch.equal(weight[1].double(), torch.cat((once.double() * 2.0**-127, once.double() * 2.0**100)))
    assert weight.signbit()[0, 8]
    found["scales"][1, 0] = 255
    with pytest.raises(ModelError, match="scale of 255, which is no number"):
        Mxfp4().build(found, torch.float32)


def test_values_are_those_of_transformers():
    found, values = packed(3, 4, 96, 0)
    assert torch.equal(convert_moe_packed_tensors(**found, dtype=torch.float32).mT, values)
    for expert in range(3):
        built = Mxfp4().build({end: each[expert] for end, each in found.items()}, torch.float32)
        assert torch.equal(dequantize(built, torch.float32), values[expert])


@pytest.mark.parametrize("left_out", [None, "model.layers.1.mlp.experts"])
@pytest.mark.parametrize("is_unpacked", [True, False])
def test_values_are_those_of_the_unpacked_experts(
    left_out, is_unpacked, source, tmp_path, load, logits_of, monkeypatch
):
    plain = write(source, tmp_path / "model", left_out=left_out)
    expected = logits_of(load(plain), IDS)
    monkeypatch.setattr(loader, "is_unpacked", lambda device: is_unpacked)
    loaded = load(tmp_path / "model")
    assert torch.equal(logits_of(loaded, IDS), expected)
    monkeypatch.setattr(loader, "pack_weight", lambda weight: weight)  # copies of the CPU's
    loaded = load(tmp_path / "model")
    predicted = weights_nbytes(loaded.config, torch.float32, device=CPU if is_unpacked else None)
    assert predicted == held_nbytes(loaded.model)


def test_one_line_says_that_experts_are_unpacked(source, tmp_path, load, caplog):
    write(source, tmp_path / "model")
    with caplog.at_level("INFO", "qkv_engine"):
        load(tmp_path / "model")
    assert [record.getMessage() for record in caplog.records] == [
        "mxfp4 weights are unpacked: cpu multiplies floats faster"
    ]


@pytest.mark.parametrize("is_unpacked", [True, False])
def test_ranks_have_parts_of_whole_blocks(is_unpacked, source, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "is_unpacked", lambda device: is_unpacked)
    write(source, tmp_path / "model")
    check_two_ranks(tmp_path / "model")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.down_proj_blocks cannot be split over the ranks"):
        logits_on_ranks(tmp_path / "model", 4)


def test_blocks_must_be_whole(source, tmp_path, load):
    write(source, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"hidden_size": 80}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"experts\.gate_up_proj_blocks: 80 columns are no whole number of blocks of 32"
    ):
        load(tmp_path / "model")


def test_a_broken_expert_is_named(source, tmp_path, load):
    write(source, tmp_path / "model")
    path, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(path)
    tensors[f"{name}_scales"][3, 0, 0] = 255
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.gate_up_proj of expert 3 has a scale of 255"):
        load(tmp_path / "model")
    save_file(tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, :-1].contiguous()}, path)
    with pytest.raises(ModelError, match=r"gate_up_proj_scales has shape \[5, 127, 2\].*\[5, 128, 2\]"):
        load(tmp_path / "model")
    save_file(tensors | {f"{name}_scales": tensors[f"{name}_scales"].float()}, path)
    with pytest.raises(ModelError, match=r"gate_up_proj_scales is F32.*U8"):
        load(tmp_path / "model")
    del tensors[f"{name}_blocks"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.experts\.gate_up_proj_blocks"):
        load(tmp_path / "model")


def test_experts_of_other_families_are_refused(make_reference, tmp_path, load):
    make_reference("Mixtral", num_local_experts=5).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": CONFIG}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r"moe\.experts\.0\.w1: experts with tensors of their own are not supported in MXFP4"
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_greedy_tokens_are_those_of_the_unpacked_experts(source, tmp_path, monkeypatch):
    plain = write(source, tmp_path / "model")
    check_tokens(plain, tmp_path / "model", IDS.tolist(), 40, monkeypatch)


@pytest.mark.parametrize("is_unpacked", [True, False])
def test_memory_stays_below_the_model_and_a_layers_experts(is_unpacked, make_reference, tmp_path):
    """Peak of a load: the model as it is kept, the experts of one layer, a buffer."""
    shape = SHAPE | {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 4}
    reference = make_reference("GptOss", **shape).to(torch.bfloat16)
    stored = {}
    for name, tensor in reference.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            number, columns, rows = tensor.shape
            stored[f"{name}_blocks"] = torch.randint(0, 256, (number, rows, columns // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.full((number, rows, columns // 32), 120, dtype=torch.uint8)
        else:
            stored[name] = tensor.contiguous()
    reference.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": CONFIG}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    peak, model = load_peak(tmp_path, is_unpacked=is_unpacked)
    experts = 16 * 3 * 512 * 512 * 2 / 2**20
    assert (model > 4 * experts) is is_unpacked and peak < model + experts + 32
