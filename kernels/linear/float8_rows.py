"""Activations as 8-bit floats in Triton, with a scale a row or for each 128 columns of one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from .codes import BLOCK

MAX_FLOAT8 = tl.constexpr(448.0)  # the largest of float8_e4m3fn


class Float8Rows(NamedTuple):
    """Rows of 8-bit floats: codes float8_e4m3fn [M, I].

    ``scales`` float32 [M, 1], or a scale for each 128 columns, [M, ceil(I / 128)] with strides (1, M).
    """

    codes: Tensor
    scales: Tensor


@triton.jit(do_not_specialize=["M"])
def quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, M,
    K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``x / scales``, where each scale makes the largest magnitude of its elements 448.

    Shapes:  x, codes [M, K];  scales [M], with BLOCKS [cdiv(K, 128), M]
    Grid:    (M,)
    """
    let_next_start(OVERLAP)
    i_m, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    COLUMNS: tl.constexpr = 128 if BLOCKS else BLOCK_K  # that share a scale
    SCALES: tl.constexpr = BLOCK_K // COLUMNS
    wait_for_previous(OVERLAP)
    b_x = tl.load(x_ptr + i_m * K + o_k, mask=o_k < K, other=0.0)
    b_wide = tl.reshape(b_x.to(tl.float32), [SCALES, COLUMNS])
    b_scale = tl.maximum(tl.max(tl.abs(b_wide), 1), 1e-12) / MAX_FLOAT8
    b_codes = tl.minimum(tl.maximum(b_wide * (1.0 / b_scale)[:, None], -MAX_FLOAT8), MAX_FLOAT8)
    b_codes = tl.reshape(b_codes.to(tl.float8e4nv), [BLOCK_K])
    tl.store(codes_ptr + i_m * K + o_k, b_codes, mask=o_k < K)
    o_scale = tl.arange(0, SCALES)
    tl.store(scales_ptr + o_scale * M + i_m, b_scale, mask=o_scale * COLUMNS < K)


def quantize_rows(x: Tensor, *, blocks: bool = False) -> Float8Rows:
    """``x`` [M, I], contiguous, in 8-bit floats; with ``blocks`` each 128 columns of a row have a scale."""
    assert x.is_contiguous()
    num_rows, size = x.shape
    codes = x.new_empty(num_rows, size, dtype=torch.float8_e4m3fn)
    shape = (triton.cdiv(size, BLOCK), num_rows) if blocks else (num_rows, 1)
    scales = x.new_empty(shape, dtype=torch.float32)
    constexprs, num_warps = rows_variant(size)
    options = {"BLOCKS": blocks, "num_warps": num_warps, **overlap_options(x.device)}
    quantize_rows_kernel[(num_rows,)](x, codes, scales, num_rows, **constexprs, **options, **FUSED)
    return Float8Rows(codes, scales.T if blocks else scales)


def rows_variant(size: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``."""
    block = max(BLOCK, triton.next_power_of_2(size))
    return {"K": size, "BLOCK_K": block}, min(16, max(1, block // 512))
