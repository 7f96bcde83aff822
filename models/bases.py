"""Files of bases: a matrix and variances of K and of V for each layer and KV head, as safetensors beside their plan.

A cached vector x of a head is stored as P x. The plan has the file's digest, the file's metadata say of which model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from qkv_engine.config import BasesFile
from qkv_engine.errors import ConfigError, ModelError
from qkv_engine.fingerprint import ModelFingerprint
from qkv_engine.input_files import read_input

from .checkpoint import StoredTensor, parse_header
from .config import ModelConfig

MOST_CONDITION = 1e4  # of a matrix; rounding errors of scores grow with it
FORMAT: Final = "qkv-engine bases"
VERSION: Final = "2"  # of the format; files of another version are refused
_MAX_HEADER_NBYTES = 2**20
_MAX_WHY_CHARS = 400
_ALIGNMENT = 8  # of the data, in bytes
_NUM_DIMS = (2, 2, 1, 1)  # of the tensors of ``LayerBases``, heads not counted


class LayerBases(NamedTuple):
    """The bases of one layer's K and V, float32 [H, D, D] for the KV heads of all ranks. Rows are the new channels.

    ``k_variance``, ``v_variance``: of the new channels within blocks of the texts of calibration, float32 [H, D].
    """

    k: Tensor
    v: Tensor
    k_variance: Tensor
    v_variance: Tensor


def bases_bytes(bases: Sequence[LayerBases], model: ModelFingerprint) -> bytes:
    """The file of ``bases``, those of each layer of ``model`` that has KV. Equal bases make equal bytes."""
    tensors = {name: x for number, each in enumerate(bases) for name, x in zip(_names(number), each, strict=True)}
    metadata = {"format": FORMAT, "version": VERSION, "model": msgspec.json.encode(model).decode()}
    header: dict[str, object] = {"__metadata__": metadata}
    data = list[bytes]()
    position = 0
    for name, x in tensors.items():
        data.append(x.detach().cpu().float().contiguous().numpy().astype("<f4").tobytes())
        end = position + len(data[-1])
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    return b"".join((len(raw).to_bytes(8, "little"), raw, *data))


def read_bases(file: BasesFile, config: ModelConfig, weights: str | None = None) -> list[LayerBases]:
    """The bases of each layer with KV of its own, checked: they are those of this model and can be inverted.

    ``weights``: digest of the model's checkpoint, None to take bases for any weights of the shape.
    Raises ``ConfigError`` for any other file.
    """
    shapes = {
        name: (spec.num_kv_heads, *(spec.head_dim,) * num_dims)
        for number, spec in enumerate(config.attention)
        for name, num_dims in zip(_names(number), _NUM_DIMS, strict=True)
    }
    nbytes = 8 + _MAX_HEADER_NBYTES + sum(4 * math.prod(shape) for shape in shapes.values())
    try:
        data = read_input(file.path, field="kv", max_nbytes=nbytes)
    except ConfigError as error:
        raise _refusal(file, error.message) from error
    if hashlib.sha256(data).hexdigest() != file.digest:
        raise _refusal(file, "not the bases that the plan was made with: their digest differs")
    try:
        model, tensors = _read_header(data)
    except (ModelError, ValueError) as error:  # msgspec's errors are of the latter kind
        raise _refusal(file, str(error)[:_MAX_WHY_CHARS]) from error
    model.check_shape(config, file.path)
    if weights is not None:
        model.check_weights(weights, file.path)
    if tensors.keys() != shapes.keys():
        name = min(tensors.keys() ^ shapes.keys())
        raise _refusal(file, f"tensor {name[:80]} is {'missing' if name in shapes else 'none of the model'}")
    for name, shape in shapes.items():
        dtype, own = tensors[name].dtype, tensors[name].shape
        if (dtype, own) != ("F32", shape):
            raise _refusal(file, f"tensor {name} is {dtype} {list(own)}, not F32 {list(shape)}")
    found = {name: _tensor(data, tensors[name]) for name in shapes}
    for name, x in found.items():
        if not bool(x.isfinite().all()):
            raise _refusal(file, f"tensor {name} has values that are not finite")
        if x.dim() == 2 and not bool((x >= 0).all()):
            raise _refusal(file, f"tensor {name} has variances below 0")
        if x.dim() == 3 and not condition(x) <= MOST_CONDITION:
            raise _refusal(file, f"a matrix of tensor {name} cannot be inverted well")
    return [LayerBases(*(found[name] for name in _names(number))) for number in range(len(config.attention))]


def condition(matrices: Tensor) -> float:
    """The largest condition number of ``matrices`` [H, D, D]; not finite for singular ones."""
    values = torch.linalg.svdvals(matrices.double())
    return float((values[:, 0] / values[:, -1]).max())


def _names(layer: int) -> tuple[str, str, str, str]:
    """The tensors of ``LayerBases``."""
    k, v = f"layers.{layer}.k", f"layers.{layer}.v"
    return k, v, f"{k}.variance", f"{v}.variance"


def _read_header(data: bytes) -> tuple[ModelFingerprint, dict[str, StoredTensor]]:
    """The model that a file is for, and its tensors. Raises ``ModelError`` or ``ValueError``."""
    nbytes = int.from_bytes(data[:8], "little")
    raw = data[8 : 8 + min(nbytes, _MAX_HEADER_NBYTES)]
    if len(raw) < nbytes or not raw.startswith(b"{"):
        raise ValueError("no safetensors file, or a truncated one")
    tensors, metadata = parse_header(raw, "the file", len(data))
    if not isinstance(metadata, dict) or (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"its metadata are not those of {FORMAT}, version {VERSION}")
    return msgspec.json.decode(str(metadata.get("model")), type=ModelFingerprint), tensors


def _tensor(data: bytes, stored: StoredTensor) -> Tensor:
    part = bytearray(data[stored.offset : stored.offset + stored.nbytes])
    return torch.frombuffer(part, dtype=torch.float32).view(stored.shape)


def _refusal(file: BasesFile, why: str) -> ConfigError:
    message = f"its file of bases cannot be used: {why}"
    return ConfigError(message, field="kv", value=file.path, remedy="Make it anew with qkv-engine plan")
