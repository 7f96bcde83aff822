"""Dense sides in torch, plainly and on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import Side, SideBytes, TorchOps, plain_cpu_ops
from .layout import DenseSide


def elements(rows: SideBytes, side: Side) -> Tensor:
    """Elements [n, H, T, D] of a dense side in its dtype, a view."""
    shape, dtype = side.shape, side.dense_dtype
    assert dtype is not None, "codes have no elements"
    return rows.codes.view(dtype).view(-1, shape.num_kv_heads, shape.num_tokens, shape.head_dim)


def quantize(x: Tensor, side: DenseSide, bank: Tensor | None = None) -> SideBytes:
    """The bytes of ``x`` [n, H, T, D] in the side's dtype."""
    rows = x.to(side.dtype).contiguous().flatten(1).view(torch.uint8)
    return SideBytes(rows, rows[:, :0])


def dequantize(rows: SideBytes, side: DenseSide) -> Tensor:
    """Elements [n, H, T, D] float32."""
    return elements(rows, side).float()


def demote(rows: SideBytes, old: Side, new: DenseSide) -> SideBytes:
    """Never called: a dense side follows dense sides alone, which are copied."""
    raise ValueError(f"no demotion leads to {new}")


DENSE_TORCH = TorchOps(quantize, dequantize, demote, plain_cpu_ops(quantize, dequantize, demote))
