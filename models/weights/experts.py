"""Experts in packed forms, from a checkpoint: dequantized while they are loaded, one expert after another."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError

import torch
from torch import Tensor, nn

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import dequantize
from qkv_engine.sizes import format_size

from ..checkpoint import Checkpoint
from ..moe import ExpertMatrices, MoE
from ..ranks import Part
from .format import CheckpointTensor, QuantizedTensor, split_parts
from .plain import PLAIN

logger = logging.getLogger("qkv_engine")


def packed_experts(net: nn.Module) -> Iterator[tuple[str, MoE, ExpertMatrices]]:
    """Full names of matrices of experts that are not plain, their modules, and what they are."""
    for path, module in net.named_modules():
        if isinstance(module, MoE) and module.format is not PLAIN:
            parent = path.rpartition(".")[0]
            for each in module.packed_experts():
                yield f"{parent}.{each.name}" if parent else each.name, module, each


def expert_tensors(net: nn.Module) -> Iterator[QuantizedTensor]:
    """What the checkpoint has of these experts. Raises ``ModelError`` for matrices that cannot be split so."""
    for name, moe, matrices in packed_experts(net):
        whole = Part.all(matrices.rows.whole), Part.all(matrices.columns.whole)
        for each in moe.format.tensors:
            full = f"{name}_{each.suffix}"
            _check_blocks(full, each, matrices.columns.whole)
            parts = split_parts(full, each, matrices.rows, matrices.columns)
            shape = (moe.num_experts, *(part.whole for part in split_parts(full, each, *whole)))
            yield QuantizedTensor(full, shape, each.dtypes, moe.num_experts * math.prod(part.size for part in parts))


def load_experts(
    checkpoint: Checkpoint,
    net: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    *,
    advance: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Fills the parameters of these experts in ``dtype``."""
    found = list(packed_experts(net))
    if found:
        nbytes = sum(matrices.parameter.nbytes for _, _, matrices in found)
        what = f"{found[0][1].format.name} experts are dequantized while they are loaded"
        logger.info("%s, to %s in %s", what, format_size(nbytes), str(dtype).removeprefix("torch."))
    for name, moe, matrices in found:
        for expert in range(moe.num_experts):
            if stopped():
                raise CancelledError
            tensors = {}
            for each in moe.format.tensors:
                parts = split_parts(name, each, matrices.rows, matrices.columns)
                tensors[each.suffix] = _read(checkpoint, f"{name}_{each.suffix}", expert, parts)
            advance(sum(each.nbytes for each in tensors.values()))
            try:
                built = moe.format.build({end: each.to(device) for end, each in tensors.items()}, dtype)
            except ModelError as error:
                raise ModelError(f"{name} of expert {expert} {error}") from error
            matrices.parameter[expert] = dequantize(built, dtype)


def _read(checkpoint: Checkpoint, name: str, expert: int, parts: Sequence[Part]) -> Tensor:
    """A part of an expert's tensor, on the CPU; its rows are read whole."""
    (size, first, whole), *rest = parts
    *between, last = (part.whole for part in rest)
    per_row = math.prod(between)
    rows = Part(size * per_row, (expert * whole + first) * per_row, checkpoint.tensors[name].num_rows)
    found = checkpoint.read(name, (rows, Part.all(last))).view(size, *between, last)
    for dim, part in enumerate(rest, start=1):
        found = found.narrow(dim, part.first, part.size)
    return found


def _check_blocks(name: str, each: CheckpointTensor, columns: int) -> None:
    for dim in each.dims:
        if dim.of == "columns" and columns % dim.per:
            raise ModelError(f"{name}: {columns} columns are no whole number of blocks of {dim.per}")
