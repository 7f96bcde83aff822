"""Plain torch: quantized weights as floats, and their product up to the last rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .codes import (
    BLOCK,
    FLOAT4_BIAS,
    FLOAT4_GROUP,
    FLOAT4_VALUES,
    ZERO_4_BIT,
    Float4Weight,
    Float8Weight,
    IntegerWeight,
)


def dequantize(weight: IntegerWeight | Float8Weight | Float4Weight) -> Tensor:
    """Float32 [O, I], columns in the order of ``x``."""
    num_rows, num_columns = weight.shape
    if isinstance(weight, Float4Weight):
        return _float4(weight)
    if isinstance(weight, Float8Weight):
        scales = weight.scales
        if weight.is_blockwise:
            scales = scales.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
        return weight.codes.float() * scales
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
    groups = codes.float().view(num_rows, -1, weight.group)
    if weight.zeros is not None:
        groups = groups - weight.zeros.float()[:, :, None]
    elif weight.bits == 4:
        groups = groups - ZERO_4_BIT
    values = (groups * weight.scales.float()[:, :, None]).flatten(1)
    if weight.order is None:
        return values
    found = torch.empty_like(values)
    found[:, weight.order.long()] = values
    return found


def _float4(weight: Float4Weight) -> Tensor:
    values = torch.tensor((*FLOAT4_VALUES, *(-value for value in FLOAT4_VALUES)), device=weight.codes.device)
    found = torch.stack([values[(weight.codes & 15).int()], values[(weight.codes >> 4).int()]], 2)
    # A float64's exponent, so that the smallest powers are exact.
    powers = ((weight.scales.long() + (1023 - FLOAT4_BIAS)) << 52).view(torch.float64).float()
    return (found.view(len(found), -1, FLOAT4_GROUP) * powers[:, :, None]).flatten(1)


def linear(x: Tensor, weight: IntegerWeight | Float8Weight | Float4Weight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in float64 up to the last rounding."""
    return reference.linear(x, dequantize(weight), bias)
