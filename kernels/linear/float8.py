"""Products with weights of 8-bit floats on a GPU: of many rows by the tensor cores for such floats.

Activations are then quantized a token: a row's largest magnitude becomes 448, the largest of float8_e4m3fn.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..swiglu import swiglu
from .integer import linear_integer
from .packed import PackedCodes

MAX_FLOAT8 = tl.constexpr(448.0)
MIN_ROWS = 33  # fewer are bound by the weight's bytes, whatever multiplies
VECTOR = 16  # rows and columns of the weight are multiples of it


@triton.jit
def quantize_rows_kernel(
    x_ptr, out_ptr, scales_ptr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x / scale``, the row's largest magnitude over 448.

    Shapes:  x, out [M, K];  scales [M]
    Grid:    (M,)
    """
    let_next_start(OVERLAP)
    i_m, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    m_k = o_k < K
    wait_for_previous(OVERLAP)
    b_x = tl.load(x_ptr + i_m * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(b_x), 0), 1e-12) / MAX_FLOAT8
    b_out = tl.minimum(tl.maximum(b_x * (1.0 / scale), -MAX_FLOAT8), MAX_FLOAT8)
    tl.store(out_ptr + i_m * K + o_k, b_out.to(tl.float8e4nv), mask=m_k)
    tl.store(scales_ptr + i_m, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [M, I] and scales float32 [M, 1] of ``x`` [M, I]."""
    num_rows, size = x.shape
    out, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(num_rows, 1, dtype=torch.float32)
    constexprs, num_warps = quantize_variant(size)
    options = overlap_options(x.device) | FUSED
    quantize_rows_kernel[(num_rows,)](x, out, scales, **constexprs, num_warps=num_warps, **options)
    return out, scales


def quantize_variant(size: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``."""
    block = triton.next_power_of_2(size)
    return {"K": size, "BLOCK_K": block}, min(16, max(1, block // 512))


@cache
def has_float8(device: torch.device) -> bool:
    """Whether the device has tensor cores for 8-bit floats."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def linear_float8(x: Tensor, weight: PackedCodes, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """As ``linear_integer``; activations of many rows are quantized, too, where the device multiplies 8-bit floats."""
    if len(x) < MIN_ROWS or not can_scale(x, weight):
        return linear_integer(x, weight, bias, gated=gated)
    codes, scales = quantize_rows(x)
    out = torch._scaled_mm(codes, weight.codes.T, scales, weight.scales.T, bias, None, x.dtype, use_fast_accum=True)
    return swiglu(out) if gated else out


def can_scale(x: Tensor, weight: PackedCodes) -> bool:
    """Whether torch's product of 8-bit floats takes the operands."""
    is_aligned = all(size % VECTOR == 0 for size in weight.shape)
    return x.dtype is torch.bfloat16 and is_aligned and not weight.is_blockwise and has_float8(x.device)
