"""Dequantization: page sides as plain tensors, for attention on the CPU, prefill over sealed blocks and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout, Side
from .reference import dequant_reference


def dequant(
    memory: Tensor, addresses: Tensor, layout: BlockLayout, layer: int, side: str, dtype: torch.dtype
) -> Tensor:
    """K ("k") or V ("v") of one layer of the blocks at ``addresses``.

    Shapes:  memory [M] uint8;  addresses [n] int64, byte addresses of slots;  returns [n, H, T, D] ``dtype``
    Source:  x = min + code * range / (2^bits - 1)
    """
    index = 2 * layer + (side == "v")
    return dequant_side(memory, addresses + layout.offsets[index], layout.sides[index], dtype)


def dequant_side(memory: Tensor, addresses: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """The same for sides that start at ``addresses``."""
    if memory.is_cuda:
        from .triton import dequant_triton

        return dequant_triton(memory, addresses, side, dtype)
    from .cpu import dequant_cpu

    return dequant_cpu(memory, addresses, side, dtype)


__all__ = ["dequant", "dequant_reference", "dequant_side"]
