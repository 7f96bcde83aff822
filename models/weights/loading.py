"""Weights of linear layers that are not plain, from a checkpoint: checked by names, shapes and dtypes, then built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from concurrent.futures import CancelledError
from typing import Any

import torch
from torch import nn

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import dequantize

from ..checkpoint import Checkpoint
from ..layers import Linear, Projection
from ..ranks import Part
from .codes import put_rows
from .experts import expert_tensors, load_experts
from .format import QuantizedTensor, split_parts
from .plain import FLOATS, PLAIN

_STREAMED_ROWS = 4096  # of a projection that is quantized while it is read, at a time
# Ends of names of what a quantized checkpoint has beside the weights: scales of activations and KV, and shapes.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_shape", ".input_scale_ub")


def quantized_layers(net: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Paths and layers whose weights are not plain."""
    for path, module in net.named_modules():
        if isinstance(module, Linear) and module.format is not PLAIN:
            yield path, module


def quantized_tensors(net: nn.Module) -> Iterator[QuantizedTensor]:
    """What the checkpoint has of these layers, and of packed experts.

    Raises ``ModelError`` for a projection that cannot be split so.
    """
    for path, layer in quantized_layers(net):
        for projection in layer.projections():
            whole = Part.all(projection.rows.whole), Part.all(projection.columns.whole)
            for each in layer.format.tensors:
                name = f"{_full_name(path, projection)}.{each.suffix}"
                parts = split_parts(name, each, projection.rows, projection.columns)
                shape = tuple(part.whole for part in split_parts(name, each, *whole))
                yield QuantizedTensor(name, shape, each.dtypes, math.prod(part.size for part in parts))
    yield from expert_tensors(net)


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
    for path, layer in quantized_layers(net):
        for projection in layer.projections():
            name = f"{_full_name(path, projection)}.bias"
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
    for path, layer in quantized_layers(net):
        rows, columns = layer.weight.shape
        with torch.device(device):
            target: Any = layer.weight if unpack else layer.format.empty(rows, columns, dtype)
        for projection in layer.projections():
            name = _full_name(path, projection)
            for part in _pieces(projection, layer.format.is_streamed):
                if stopped():
                    raise CancelledError
                parts = {each.suffix: split_parts(name, each, part.rows, part.columns) for each in layer.format.tensors}
                found = {suffix: checkpoint.read(f"{name}.{suffix}", parts[suffix]) for suffix in parts}
                advance(sum(each.nbytes for each in found.values()))
                try:
                    built: Any = layer.format.build({end: each.to(device) for end, each in found.items()}, dtype)
                except ModelError as error:
                    raise ModelError(f"{name} {error}") from error
                if unpack:
                    target[part.start : part.start + part.rows.size] = dequantize(built, dtype)
                elif not put_rows(target, part.start, built):
                    message = f"{name} cannot stand in one matrix with others: blocks or the order of columns differ"
                    raise ModelError(message)
        if not unpack:
            del layer.weight
            layer.weight = target
    load_experts(checkpoint, net, dtype, device, advance=advance, stopped=stopped)


def _pieces(projection: Projection, is_streamed: bool) -> Iterator[Projection]:
    name, (size, first, whole), columns, start = projection
    step = _STREAMED_ROWS if is_streamed else size
    for row in range(0, size, step):
        yield Projection(name, Part(min(step, size - row), first + row, whole), columns, start + row)


def _full_name(path: str, projection: Projection) -> str:
    parent = path.rpartition(".")[0]
    return f"{parent}.{projection.name}" if parent else projection.name
