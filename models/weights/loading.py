"""Weights of linear layers that are not plain, from a checkpoint: checked by names, shapes and dtypes, then built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from concurrent.futures import CancelledError
from typing import Any

import torch
from torch import Tensor, nn

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import dequantize

from ..checkpoint import Checkpoint
from ..layers import Matrix, Projection, QuantizableLayer
from ..ranks import Part
from ..rows import Targets, fill_rows, full_name
from .codes import STREAMED_ROWS, put_rows
from .experts import is_plain_stack, load_stacked, stacked_tensors
from .format import CheckpointTensor, QuantizedTensor, split_parts
from .plain import FLOATS, PLAIN

# Ends of names of what a quantized checkpoint has beside the weights: scales of activations and KV, and shapes.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_shape", ".input_scale_ub")


def quantized_layers(net: nn.Module) -> Iterator[tuple[str, QuantizableLayer]]:
    """Paths and layers whose weights are not plain."""
    for path, module in net.named_modules():
        if isinstance(module, QuantizableLayer) and module.format is not PLAIN:
            yield path, module


def quantized_matrices(net: nn.Module) -> Iterator[tuple[str, QuantizableLayer, Matrix]]:
    """The matrices of these layers."""
    return ((path, layer, matrix) for path, layer in quantized_layers(net) for matrix in layer.matrices())


def quantized_tensors(net: nn.Module) -> Iterator[QuantizedTensor]:
    """What the checkpoint has of these layers. Raises ``ModelError`` for a projection that cannot be split so."""
    for path, layer, matrix in quantized_matrices(net):
        if is_plain_stack(layer, matrix):
            yield from stacked_tensors(path, layer, matrix)
            continue
        for projection in matrix.projections:
            whole = Part.all(projection.rows.whole), Part.all(projection.columns.whole)
            for each in layer.format.tensors:
                name = _tensor_name(path, projection, each)
                parts = split_parts(name, each, projection.rows, projection.columns)
                shape = tuple(part.whole for part in split_parts(name, each, *whole))
                shape = shape if projection.expert is None else (projection.expert.whole, *shape)
                yield QuantizedTensor(name, shape, each.dtypes, math.prod(part.size for part in parts))


def check_quantized(checkpoint: Checkpoint, net: nn.Module) -> set[str]:
    """Names of the tensors that these layers read. Raises ``ModelError`` for shapes and dtypes that do not fit."""
    names = set()
    for name, shape, dtypes, _ in quantized_tensors(net):
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise ModelError(f"{', '.join(checkpoint.file_names[:3])} lack {name}, which config.json calls for")
        where = f"{stored.file_name}: tensor {name}"
        if stored.dtype not in dtypes:
            raise ModelError(f"{where} is {stored.dtype}", remedy=f"Supported: {', '.join(dtypes)}")
        if stored.shape != shape and not (stored.shape == () and shape == (1,)):
            raise ModelError(f"{where} has shape {list(stored.shape)}; config.json calls for {list(shape)}")
        names.add(name)
    return names


def zero_biases(checkpoint: Checkpoint, net: nn.Module, names: Set[str]) -> set[str]:
    """Those of ``names`` that are biases of these layers, which have none: old GPTQ files have zeros there.

    Raises ``ModelError`` for one that is not zero.
    """
    found = set()
    for path, _, matrix in quantized_matrices(net):
        for projection in matrix.projections:
            name = f"{full_name(path, projection.name)}.bias"
            if name not in names:
                continue
            stored = checkpoint.tensors[name]
            if stored.dtype not in FLOATS or stored.shape != (projection.rows.whole,):
                continue
            if any(bool(piece.any()) for _, _, piece in checkpoint.pieces(name)):
                message = f"{stored.file_name}: tensor {name} is not zero, and config.json gives the layer no bias"
                raise ModelError(message)
            found.add(name)
    return found


def quantized_nbytes(checkpoint: Checkpoint, net: nn.Module) -> int:
    """Bytes that ``load_quantized`` reads."""
    found = ((checkpoint.tensors[each.name], each) for each in quantized_tensors(net))
    return sum(stored.nbytes * each.num_read // math.prod(stored.shape) for stored, each in found)


def load_quantized(
    checkpoint: Checkpoint,
    net: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    *,
    unpack: bool,
    advance: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Builds the weights layer by layer; with ``unpack`` they fill the plain matrices that the layers then have.

    ``advance`` is told how many bytes have been read.
    """

    def fill(targets: Targets) -> None:
        fill_rows(checkpoint, targets, advance, stopped)

    for path, layer, matrix in quantized_matrices(net):
        if is_plain_stack(layer, matrix):
            load_stacked(fill, path, layer, matrix, dtype, device, unpack=unpack)
            continue
        with torch.device(device):
            parameter = getattr(layer, matrix.attribute)
            target: Any = parameter.view(matrix.shape) if unpack else layer.format.empty(*matrix.shape, dtype)
        for part in _pieces(matrix, layer.format.is_streamed):
            if stopped():
                raise CancelledError
            found = _read(checkpoint, path, part, layer.format.tensors)
            advance(sum(each.nbytes for each in found.values()))
            try:
                built = layer.format.build({end: each.to(device) for end, each in found.items()}, dtype)
            except ModelError as error:
                raise ModelError(f"{_name(path, part)} {error}") from error
            if unpack:
                target[part.start : part.start + part.rows.size] = dequantize(built, dtype)
            elif not put_rows(target, part.start, built):
                message = "cannot stand in one matrix with others: blocks or the order of columns differ"
                raise ModelError(f"{_name(path, part)} {message}")
        if not unpack:
            layer.hold(matrix.attribute, target)


def _pieces(matrix: Matrix, is_streamed: bool) -> Iterator[Projection]:
    for projection in matrix.projections:
        size, first, whole = projection.rows
        step = STREAMED_ROWS if is_streamed else size
        for row in range(0, size, step):
            rows = Part(min(step, size - row), first + row, whole)
            yield projection._replace(rows=rows, start=projection.start + row)


def _read(
    checkpoint: Checkpoint, path: str, part: Projection, tensors: tuple[CheckpointTensor, ...]
) -> dict[str, Tensor]:
    found = {}
    for each in tensors:
        name = _tensor_name(path, part, each)
        parts = split_parts(name, each, part.rows, part.columns)
        found[each.suffix] = checkpoint.read(name, parts if part.expert is None else (part.expert, *parts))
    return found


def _tensor_name(path: str, projection: Projection, each: CheckpointTensor) -> str:
    """Tensors of all experts are not those of a module: their names are longer by a word."""
    between = "." if projection.expert is None else "_"
    return f"{full_name(path, projection.name)}{between}{each.suffix}"


def _name(path: str, projection: Projection) -> str:
    of_expert = "" if projection.expert is None else f" of expert {projection.expert.first}"
    return full_name(path, projection.name) + of_expert
