"""Experts that are not plain: which of them are not read, and those that a plain checkpoint has in stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import IntegerWeight, dequantize

from ..checkpoint import Checkpoint
from ..layers import CheckpointRows, Matrix, QuantizableLayer
from ..moe import MoE
from ..rows import Targets, full_name
from .codes import STREAMED_ROWS, quantized
from .format import QuantizedTensor
from .plain import FLOATS, PLAIN
from .scheme import REMEDY, Scheme


def check_experts(path: str, moe: MoE, scheme: Scheme) -> None:
    """Raises ``ModelError`` for experts in a format that they are not read in."""
    if moe.format is PLAIN or moe.format.is_streamed:
        return
    for matrix in moe.matrices():
        why = None
        if matrix.is_stacked is not moe.format.is_stacked:
            why = "whose matrices are one tensor" if matrix.is_stacked else "with tensors of their own"
        with torch.device("meta"):
            weight = moe.format.empty(*matrix.shape, torch.float32)
        if isinstance(weight, IntegerWeight) and weight.order is not None:
            why = "with an order of columns"
        if why is not None:
            name = full_name(path, matrix.projections[0].name)
            message = f"{name}: experts {why} are not supported in {moe.format.name}"
            raise ModelError(message, field="quantization_config", value=scheme.name, remedy=REMEDY)


def check_routers(checkpoint: Checkpoint, net: nn.Module) -> None:
    """Raises ``ModelError`` for a router that is quantized. Tools leave routers plain, and many do not say so."""
    for path, moe in net.named_modules():
        if not isinstance(moe, MoE):
            continue
        router = full_name(path, moe.router_name)
        found = [checkpoint.tensors.get(f"{router}.{each.suffix}") for each in (*PLAIN.tensors, *moe.format.tensors)]
        stored = next((each for each in found if each is not None), None)
        if stored is not None and (found[0] is None or stored.dtype not in FLOATS):
            message = f"{stored.file_name}: {router}, which chooses experts, is quantized"
            raise ModelError(message, remedy=REMEDY)


def is_plain_stack(layer: QuantizableLayer, matrix: Matrix) -> bool:
    """Whether a matrix that is quantized while it is read is in a tensor of all experts."""
    return matrix.is_stacked and layer.format.is_streamed


def stacked_tensors(path: str, layer: QuantizableLayer, matrix: Matrix) -> Iterator[QuantizedTensor]:
    """What the checkpoint has of such a matrix."""
    for name, part in _rows(path, layer, matrix):
        yield QuantizedTensor(name, part.shape, FLOATS, part.num_rows * part.shape[-1])


def load_stacked(
    fill: Callable[[Targets], None],
    path: str,
    layer: QuantizableLayer,
    matrix: Matrix,
    dtype: torch.dtype,
    device: torch.device,
    *,
    unpack: bool,
) -> None:
    """Has ``fill`` read a plain matrix of all experts, and quantizes it; with ``unpack`` values stay in its place."""
    if not unpack:
        shape = getattr(layer, matrix.attribute).shape
        setattr(layer, matrix.attribute, nn.Parameter(torch.empty(shape, dtype=dtype, device=device), False))
    fill(_rows(path, layer, matrix))
    values = getattr(layer, matrix.attribute).view(matrix.shape)
    if not unpack:
        layer.hold(matrix.attribute, quantized(layer.format, values, dtype))
        return
    for rows in values.split(STREAMED_ROWS):
        rows.copy_(dequantize(layer.format.build({"weight": rows}, dtype), dtype))


def _rows(path: str, layer: QuantizableLayer, matrix: Matrix) -> Iterator[tuple[str, CheckpointRows]]:
    assert isinstance(layer, MoE)
    return ((full_name(path, part.name), part) for part in layer.plain_rows(matrix))
