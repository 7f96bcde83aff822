"""Safetensors checkpoints, one file or many: headers checked in full, then tensors streamed in pieces.

An own reader in place of a memory map makes a file that shrinks while it is read an error and not a signal, and its
pieces keep peak memory at the weights plus one buffer. The format:
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv_engine.errors import ModelError
from qkv_engine.model_files import (
    check_file_name,
    file_names,
    has_file,
    open_inside,
    parse_json,
    read_exactly,
    read_into,
    read_json,
)
from qkv_engine.sizes import format_size

from .ranks import Part

logger = logging.getLogger("qkv_engine")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TENSOR_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_READ_DTYPES = TENSOR_DTYPES | {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}

_ITEM_BITS = {  # of an element, by safetensors' name of its dtype
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}
_MAX_HEADER_BYTES = 16 * 2**20  # of one file; a longer header is refused before it is read
_MAX_TENSORS = 500_000  # of one file, and of an index; more are refused. Experts have a few each
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
# Names in a checkpoint with a text part: those of other parts, and what comes before those of the text part.
_OTHER_PART = re.compile(r"(model\.)?(vision|visual|audio|multi_modal|embed_vision|embed_audio)")
_TEXT_PART = re.compile(r"^(?:(model\.)language_model\.|language_model\.)")
# Tensors that the digest samples: of a quantized projection codes, scales, zeros and the order of columns.
_SAMPLED = re.compile(
    r".*_proj(\.(weight|qweight|weight_packed|weight_scale|weight_scale_inv|weight_zero_point|scales|qzeros|g_idx)"
    r"|_blocks|_scales)"
)
_PIECE_BYTES = 32 * 2**20  # read at a time, whole rows; the peak is the weights and one piece
_DIGEST_ELEMENTS = 64  # of each projection, in the digest that tells checkpoints apart
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# First bytes of a zip of torch.save and of a bare pickle; a safetensors header of 640 bytes begins like a pickle, too.
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_CONVERT = (
    "Convert it with transformers: AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(FOLDER) "
    "writes safetensors"
)


class StoredTensor(NamedTuple):
    """One entry of a header; ``offset`` and ``nbytes`` are bytes of the file."""

    file_name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def num_rows(self) -> int:
        """Rows of the last dimension, or elements of a vector."""
        return self.shape[0] if len(self.shape) == 1 else math.prod(self.shape[:-1])


class Checkpoint:
    """The open files of one checkpoint and the tensors in them; use as a context manager."""

    def __init__(self, folder: Path):
        """Opens the files and checks every header. Raises ``ModelError`` naming the file and, where there is one, the
        tensor.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self.nbytes = 0
        self._files: dict[str, FileIO] = {}
        self._buffer = bytearray(0)
        with ExitStack() as stack:
            for file_name, names in _shards(folder).items():
                file = stack.enter_context(open_inside(folder, file_name))
                self._add_file(file_name, file, names)
            self._stack = stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take_text_part(self) -> None:
        """Keeps the tensors of the text part alone, by the names that they have in a checkpoint of nothing else."""
        others = [name for name in self.tensors if _OTHER_PART.match(name)]
        nbytes = sum(self.tensors.pop(name).nbytes for name in others)
        logger.info("%d tensors (%s) of vision and other parts are skipped", len(others), format_size(nbytes))
        self.tensors = {_TEXT_PART.sub(r"\1", name): stored for name, stored in self.tensors.items()}

    def skip_drafts(self, prefix: str) -> None:
        """Drops the tensors that begin with ``prefix``, those of layers that predict further tokens."""
        drafts = [name for name in self.tensors if name.startswith(prefix)]
        nbytes = sum(self.tensors.pop(name).nbytes for name in drafts)
        if drafts:
            logger.info("%d tensors (%s) of multi-token prediction are skipped", len(drafts), format_size(nbytes))

    @property
    def file_names(self) -> list[str]:
        return list(self._files)

    def pieces(self, name: str, first: int = 0, count: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Rows ``[start, stop)`` of ``count`` rows of a tensor from ``first`` on, or of all, in order.

        Each piece is valid until the next one is asked for.
        """
        stored = self.tensors[name]
        dtype = _READ_DTYPES[stored.dtype]
        row_bytes = stored.nbytes // stored.num_rows
        rows = stored.num_rows if count is None else count
        step = max(1, _PIECE_BYTES // row_bytes)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            piece = self._view((stop - start) * row_bytes)
            offset = stored.offset + (first + start) * row_bytes
            read_into(self._files[stored.file_name], offset, piece, stored.file_name)
            yield start, stop, torch.frombuffer(piece, dtype=dtype).view(stop - start, *stored.shape[1:][-1:])

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        """A part of a tensor, on the CPU; of more than two dimensions the first one is a single element.

        Dimensions between the rows and the last one are read whole.
        """
        stored = self.tensors[name]
        if len(parts) > 2:
            (_, first, _), (size, row, whole), *rest = parts
            parts = Part(size, first * whole + row, stored.shape[0] * whole), *rest
        (size, first, _), *rest = parts
        between = [part.whole for part in rest[:-1]]
        last, per_row = rest[-1:], math.prod(between)
        rows = size * per_row
        found = torch.empty([rows, *(part.size for part in last)], dtype=_READ_DTYPES[stored.dtype], device="cpu")
        for start, stop, piece in self.pieces(name, first * per_row, rows):
            found[start:stop].copy_(piece if not last else piece[:, last[0].first :][:, : last[0].size])
        found = found.view(size, *between, *found.shape[1:])
        for dim, part in enumerate(rest[:-1], start=1):
            found = found.narrow(dim, part.first, part.size)
        return found

    def first_elements(self, name: str, count: int) -> Tensor:
        """The first ``count`` elements of a tensor, or all it has."""
        stored = self.tensors[name]
        dtype = _READ_DTYPES[stored.dtype]
        nbytes = min(count * dtype.itemsize, stored.nbytes)
        data = read_exactly(self._files[stored.file_name], stored.offset, nbytes, stored.file_name)
        return torch.frombuffer(data, dtype=dtype)

    def _view(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def _add_file(self, file_name: str, file: FileIO, indexed: set[str] | None) -> None:
        found = read_header(file, file_name)
        if indexed is not None and found.keys() != indexed:
            name = min(found.keys() ^ indexed)
            where = "listed in the index but missing" if name in indexed else "present but not listed in the index"
            raise ModelError(f"{file_name}: tensor {name} is {where}")
        for name, stored in found.items():
            if name in self.tensors:
                raise ModelError(f"tensor {name} is in {self.tensors[name].file_name} and again in {file_name}")
            self.tensors[name] = stored
        self._files[file_name] = file
        self.nbytes += os.fstat(file.fileno()).st_size


def weights_digest(folder: Path) -> str:
    """SHA-256 in hex of a sample of each projection's weight, the same for a float32 checkpoint and its bfloat16 copy.

    Of quantized projections codes, scales and zeros are sampled as they are. Reads a few hundred bytes of each.
    Raises ``ModelError`` for a checkpoint that cannot be read.
    """
    digest = hashlib.sha256()
    with Checkpoint(folder) as checkpoint:
        for name in sorted(checkpoint.tensors):
            stored = checkpoint.tensors[name]
            if not _SAMPLED.fullmatch(name) or stored.dtype not in _READ_DTYPES or not stored.nbytes:
                continue
            sample = checkpoint.first_elements(name, _DIGEST_ELEMENTS)
            if name.endswith("_proj.weight") and stored.dtype in TENSOR_DTYPES:
                sample = sample.to(torch.bfloat16)
            digest.update(name.encode() + bytes(sample.view(torch.uint8).tolist()))
    return digest.hexdigest()


def read_header(file: FileIO, file_name: str) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file, after checking that they tile the data exactly. Raises ``ModelError``."""
    total = os.fstat(file.fileno()).st_size
    return parse_header(_raw_header(file, file_name, total), file_name, total)[0]


def parse_header(raw: bytes | bytearray, file_name: str, total: int) -> tuple[dict[str, StoredTensor], object]:
    """Tensors of a header ``raw`` in a file of ``total`` bytes, and its metadata, unchecked. See ``read_header``."""
    header = parse_json(raw, f"the header of {file_name}")
    if len(header) > _MAX_TENSORS:
        raise ModelError(f"the header of {file_name} is not an object of at most {_MAX_TENSORS} tensors")
    metadata = header.pop("__metadata__", None)
    data_start = 8 + len(raw)
    tensors = {name: _stored_tensor(name, entry, file_name, data_start) for name, entry in header.items()}
    _check_tiling(tensors, file_name, data_start, total)
    return tensors, metadata


def _raw_header(file: FileIO, file_name: str, total: int) -> bytearray:
    """The bytes between the length of the header and the data, which begin with a brace."""
    start = bytes(read_exactly(file, 0, 8, file_name)) if total >= 8 else b""
    header_bytes = int.from_bytes(start, "little")
    fits = bool(start) and header_bytes <= min(_MAX_HEADER_BYTES, total - 8)
    raw = read_exactly(file, 8, header_bytes, file_name) if fits else bytearray()
    if raw.startswith(b"{"):
        return raw
    if start.startswith(_PICKLE_MAGIC):
        raise ModelError(f"{file_name} is a pickle, whatever its name says, and is not read", remedy=_CONVERT)
    if fits:
        raise ModelError(f"{file_name} is not a safetensors file: its header is not an object")
    raise ModelError(
        f"{file_name} is not a safetensors file or is truncated: {total} bytes in all, "
        f"a header of {header_bytes} bytes announced"
    )


def _stored_tensor(name: str, entry: Any, file_name: str, data_start: int) -> StoredTensor:
    where = f"{file_name}: tensor {name[:200]}"
    if not _TENSOR_NAME.fullmatch(name):
        raise ModelError(f"{file_name}: {name[:200]!r} is not a tensor name")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise ModelError(f"{where} has an unknown dtype {dtype!r:.40}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{where} has a malformed shape or malformed offsets")
    begin, end = offsets
    nbytes, rest = divmod(math.prod(shape) * _ITEM_BITS[dtype], 8)
    if rest or end - begin != nbytes:
        raise ModelError(f"{where} has {end - begin} bytes where its shape {shape} in {dtype} needs {nbytes}")
    return StoredTensor(file_name, dtype, tuple(shape), data_start + begin, nbytes)


def _check_tiling(tensors: dict[str, StoredTensor], file_name: str, data_start: int, total: int) -> None:
    position = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != position:
            raise ModelError(f"{file_name}: tensor {name} overlaps another one or leaves a hole before it")
        position += stored.nbytes
        if position > total:
            raise ModelError(f"{file_name} is truncated: tensor {name} ends at byte {position} of {total}")
    if position != total:
        raise ModelError(f"{file_name} has {total - position} bytes after its last tensor")


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """File names of the checkpoint, each with the tensors its index promises (``None`` without an index)."""
    if has_file(folder, SINGLE_FILE):
        return {SINGLE_FILE: None}
    if not has_file(folder, INDEX_FILE):
        raise _no_weights(folder)
    index = read_json(folder, INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= _MAX_TENSORS:
        raise ModelError(f"{INDEX_FILE} has no weight_map from tensor names to files")
    shards: dict[str, set[str] | None] = {}
    for name, file_name in weight_map.items():
        check_file_name(file_name)
        if not file_name.endswith(".safetensors"):
            raise ModelError(
                f"{INDEX_FILE}: tensor {name[:200]} is not in a .safetensors file but in {file_name!r:.80}"
            )
        names = shards.setdefault(file_name, set())
        assert names is not None
        names.add(name)
    return shards


def _no_weights(folder: Path) -> ModelError:
    pickles = [name for name in file_names(folder) if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        message = f"{folder} has only pickled weights ({pickles[0]}), which can run code and are not read"
        return ModelError(message, remedy=_CONVERT)
    return ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", remedy=_CONVERT)
