"""Tiny checkpoints in each quantized form, with codes packed by plain loops over bits, and what their values are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
_MATRIX = re.compile(r"(_proj|_linear|\.w[123])\.weight$")  # of linear layers and experts


class Form(NamedTuple):
    """A form of checkpoint: its ``quantization_config``, and ``write``: of a weight the tensors, and its values."""

    config: dict[str, Any]
    write: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [A, B] as int32 [A, B * bits / 32]; place i of a word has code ``order[i]`` of those that it holds."""
    per = 32 // bits
    order = order or tuple(range(per))
    rows = []
    for row in codes.tolist():
        row += [0] * (-len(row) % per)
        found = [sum(row[at + order[i]] << bits * i for i in range(per)) for at in range(0, len(row), per)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in found])
    return torch.tensor(rows, dtype=torch.int32)


def codes_of(weight: Tensor, bits: int, group: int, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes [O, I], scales and zeros [O, I / group], and the values."""
    parts, most = weight.view(len(weight), -1, group), 2**bits - 1
    if zeros:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / most).half().float()
        points = (-low / scales).round().clamp(1, most)
    else:
        scales = (parts.abs().amax(2) / (most // 2)).half().float()
        points = torch.full_like(scales, 2.0 ** (bits - 1))
    codes = (parts / scales[:, :, None] + points[:, :, None]).round().clamp(0, most)
    values = (codes - points[:, :, None]) * scales[:, :, None]
    return codes.flatten(1).int(), scales, points.int(), values.flatten(1)


def packed(bits: int, group: int | None, zeros: bool) -> Form:
    """compressed-tensors' pack-quantized."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, points, values = codes_of(weight, bits, group or weight.shape[1], zeros=zeros)
        found = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            found["weight_zero_point"] = words(points.T, bits).T.contiguous()
        return found, values

    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return compressed("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": not zeros, **strategy}, write)


def compressed(kind: str, weights: dict[str, Any], write: Any) -> Form:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head", "re:.*layers\\.1\\.mlp.*"]}
    return Form(config | {"config_groups": {"group_0": group}}, write)


def bytes_form(strategy: str) -> Form:
    """compressed-tensors' int-quantized."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        group = GROUP if strategy == "group" else weight.shape[1]
        codes, scales, _, values = codes_of(weight, 8, group, zeros=False)
        if strategy == "tensor":
            scales = scales.amax().view(1)
            values = (codes - 128) * scales
        return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, values

    group_size = GROUP if strategy == "group" else None
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "group_size": group_size}
    return compressed("int-quantized", weights, write)


def floats(weight: Tensor, strategy: str, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """8-bit floats with scales a tensor, a channel or a block."""
    if strategy == "block":
        scales = torch.stack([torch.stack([b.abs().amax() for b in row.split(128, 1)]) for row in weight.split(128)])
        wide = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    else:
        scales = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().view(1)
        wide = scales
    codes = (weight / wide * 448).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales / 448}, codes.float() * (wide / 448)


def float_form(strategy: str) -> Form:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [128, 128]}
    return compressed("float-quantized", weights, lambda weight: floats(weight, strategy, "weight_scale"))


def scalar_form(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    found, values = floats(weight, "tensor", "weight_scale")
    found["weight_scale"] = found["weight_scale"].view(())
    return found | {"input_scale": torch.tensor(1.0)}, values


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, points, values = codes_of(weight, 4, GROUP, zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    found = {"qweight": words(codes.T, 4, order), "qzeros": words(points.T, 4, order)}
    return found | {"scales": scales.T.contiguous().half()}, values


def gptq(bits: int, *, symmetric: bool, act_order: bool = False, less: int = 1) -> Form:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight.shape[1]
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(3)) if act_order else torch.arange(columns)
        )
        codes, scales, points, values = codes_of(weight[:, order], bits, GROUP, zeros=not symmetric)
        back = order.argsort()
        found = {
            "qweight": words(codes[:, back], bits).T,
            "qzeros": words((points - less).T, bits),
            "scales": scales.T.contiguous().half(),
            "g_idx": (torch.arange(columns) // GROUP)[back].int(),
        }
        return found, values[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order}
    return Form(config | ({} if less else {"checkpoint_format": "gptq_v2"}), write)


FORMS = {
    "int4": packed(4, GROUP, zeros=False),
    "int4 channel": packed(4, None, zeros=False),
    "int4 zeros": packed(4, GROUP, zeros=True),
    "int8 words": packed(8, None, zeros=False),
    **{f"int8 {strategy}": bytes_form(strategy) for strategy in ("tensor", "channel", "group")},
    **{f"fp8 {strategy}": float_form(strategy) for strategy in ("tensor", "channel", "block")},
    "fp8": Form({"quant_method": "fp8", "activation_scheme": "static"}, scalar_form),
    "fp8 blocks": Form(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        lambda weight: floats(weight, "block", "weight_scale_inv"),
    ),
    "fbgemm": Form({"quant_method": "fbgemm_fp8"}, lambda weight: floats(weight, "channel", "weight_scale")),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "gptq": gptq(4, symmetric=True),
    "gptq zeros": gptq(4, symmetric=False),
    "gptq v2": gptq(4, symmetric=False, less=0),
    "gptq 8": gptq(8, symmetric=True),
    "gptq act-order": gptq(4, symmetric=True, act_order=True),
    "auto-round": gptq(4, symmetric=True)._replace(
        config={"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"}
    ),
}


def quantize(source: Path, folder: Path, form: Form, *, left: tuple[str, ...] = ()) -> Path:
    """Writes the model of ``source`` in ``form``; returns a folder beside it with the values in float32.

    Modules whose names have a word of ``left`` stay plain, which config.json says where the form has a list of them.
    """
    plain = folder.with_name(folder.name + "-plain")
    config = json.loads((source / "config.json").read_text())
    tensors, stored, values = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        is_left = ("ignore" in form.config and "layers.1.mlp" in name) or any(f".{word}." in name for word in left)
        if _MATRIX.search(name) and not is_left:
            found, values[name] = form.write(tensor)
            stored |= {f"{name.removesuffix('weight')}{end}": each.contiguous() for end, each in found.items()}
        else:
            stored[name] = values[name] = tensor
    more = {"quantization_config": form.config | _lists(form.config, left)}
    for path, contents, changes in ((folder, stored, more), (plain, values, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | changes))
        save_file({name: each.contiguous() for name, each in contents.items()}, path / "model.safetensors")
    return plain


def _lists(config: dict[str, Any], left: tuple[str, ...]) -> dict[str, Any]:
    if not left:
        return {}
    if "ignore" in config:
        return {"ignore": [*config["ignore"], *(f"re:.*\\.{word}$|.*\\.{word}\\..*" for word in left)]}
    return {"modules_to_not_convert": list(left)}


def unstack(folder: Path) -> None:
    """Writes stacked experts of a Qwen3.5 checkpoint as tensors of each."""
    path, found = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        base, _, end = name.rpartition(".")
        if not base.endswith(".experts"):
            found[name] = tensor
        for expert, matrix in enumerate(tensor if base.endswith(".experts") else ()):
            halves = {"gate": matrix[: len(matrix) // 2], "up": matrix[len(matrix) // 2 :]}
            parts = halves if end == "gate_up_proj" else {"down": matrix}
            found |= {f"{base}.{expert}.{key}_proj.weight": each.clone() for key, each in parts.items()}
    save_file(found, path)
