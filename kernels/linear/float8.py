"""Products with weights of 8-bit floats on a GPU: of many rows by the tensor cores for such floats."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..swiglu import swiglu
from .float8_rows import Float8Rows, quantize_rows
from .integer import linear_integer
from .packed import PackedCodes

MIN_ROWS = 33  # fewer are bound by the weight's bytes, whatever multiplies
VECTOR = 16  # rows and columns of the weight are multiples of it


@cache
def has_float8(device: torch.device) -> bool:
    """Whether the device has tensor cores for 8-bit floats."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def linear_float8(
    x: Tensor | Float8Rows, weight: PackedCodes, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """As ``linear_integer``; activations of many rows are quantized, too, where the device multiplies 8-bit floats.

    They may come quantized if ``can_scale`` says so of what they were.
    """
    if isinstance(x, Tensor):
        if not can_scale(x, weight):
            return linear_integer(x, weight, bias, gated=gated)
        x = quantize_rows(x)
    out = scaled_product(x, weight, bias)
    return swiglu(out) if gated else out


def can_scale(x: Tensor, weight: PackedCodes) -> bool:
    """Whether torch's product of 8-bit floats takes the operands, and is worth it."""
    is_aligned = all(size % VECTOR == 0 for size in weight.shape)
    is_taken = x.dtype is torch.bfloat16 and is_aligned and not weight.is_blockwise and has_float8(x.device)
    return len(x) >= MIN_ROWS and is_taken


def scaled_product(x: Float8Rows, weight: PackedCodes, bias: Tensor | None = None, *, fast: bool = True) -> Tensor:
    """bfloat16 [M, O]; ``fast``: tensor cores add up with fewer bits."""
    codes, scales = weight.codes.T, weight.scales.T
    return torch._scaled_mm(x.codes, codes, x.scales, scales, bias, None, torch.bfloat16, use_fast_accum=fast)
