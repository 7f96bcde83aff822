"""Activations as 8-bit floats with a scale a token, in Triton: alone, or by the kernel that computes them.

A row's largest magnitude becomes 448, the largest of float8_e4m3fn. Values are rounded to their dtype before, so that
the codes are those of the separate kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from .triton import swiglu_tile

MAX_FLOAT8 = tl.constexpr(448.0)


class Float8Rows(NamedTuple):
    """Rows of 8-bit floats: codes float8_e4m3fn [M, I].

    ``scales`` float32 [M, 1], or a scale for each 128 columns, [M, ceil(I / 128)] with strides (1, M).
    """

    codes: Tensor
    scales: Tensor


@triton.jit
def _store_row(b_x, codes_ptr, scales_ptr, i_m, M, K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr):
    o_k = tl.arange(0, BLOCK_K)
    COLUMNS: tl.constexpr = 128 if BLOCKS else BLOCK_K  # that share a scale
    b_wide = tl.reshape(b_x.to(tl.float32), [BLOCK_K // COLUMNS, COLUMNS])
    b_scale = tl.maximum(tl.max(tl.abs(b_wide), 1), 1e-12) / MAX_FLOAT8
    b_codes = tl.minimum(tl.maximum(b_wide * (1.0 / b_scale)[:, None], -MAX_FLOAT8), MAX_FLOAT8)
    b_codes = tl.reshape(b_codes.to(tl.float8e4nv), [BLOCK_K])
    tl.store(codes_ptr + i_m * K + o_k, b_codes, mask=o_k < K)
    o_scale = tl.arange(0, BLOCK_K // COLUMNS)
    tl.store(scales_ptr + o_scale * M + i_m, b_scale, mask=o_scale * COLUMNS < K)


@triton.jit(do_not_specialize=["M"])
def quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, M,
    K: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of ``x``, or with GATED of its SwiGLU.

    Shapes:  x [M, K], with GATED [M, 2 K], gate then up;  codes [M, K];  scales [M], with BLOCKS [cdiv(K, 128), M]
    Grid:    (M,)
    """
    let_next_start(OVERLAP)
    i_m, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    wait_for_previous(OVERLAP)
    p_x = x_ptr + i_m * (2 * K if GATED else K) + o_k
    b_x = tl.load(p_x, mask=o_k < K, other=0.0)
    if GATED:
        b_x = swiglu_tile(b_x, tl.load(p_x + K, mask=o_k < K, other=0.0))
    _store_row(b_x, codes_ptr, scales_ptr, i_m, M, K, BLOCKS, BLOCK_K)


@triton.jit(do_not_specialize=["M"])
def norm_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, codes_ptr, scales_ptr, M,
    K: tl.constexpr, EPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of ``x``, or of ``x + residual``, which then replaces the residual, behind the norm of ``rms_norm_kernel``.

    Shapes:  x [M, K];  residual [M, K] or None;  weight [K];  codes [M, K];  scales [M], with BLOCKS [cdiv(K, 128), M]
    Grid:    (M,)
    """
    let_next_start(OVERLAP)
    i_m, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    m_k = o_k < K
    b_weight = tl.load(weight_ptr + o_k, mask=m_k, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    b_x = tl.load(x_ptr + i_m * K + o_k, mask=m_k, other=0.0)
    if residual_ptr is not None:
        b_residual = tl.load(residual_ptr + i_m * K + o_k, mask=m_k, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(b_x.dtype)
        tl.store(residual_ptr + i_m * K + o_k, b_x, mask=m_k)
    b_wide = b_x.to(tl.float32)
    b_wide = (b_wide * tl.rsqrt(tl.sum(b_wide * b_wide, 0) / K + EPS)).to(b_x.dtype).to(tl.float32)
    _store_row((b_wide * b_weight).to(b_x.dtype), codes_ptr, scales_ptr, i_m, M, K, BLOCKS, BLOCK_K)


def quantize_rows(x: Tensor, *, gated: bool = False, blocks: bool = False) -> Float8Rows:
    """``x`` [M, I], or with ``gated`` the SwiGLU of ``x`` [M, 2 I], gate then up; contiguous.

    With ``blocks`` each 128 columns have a scale.
    """
    size = x.shape[1] // 2 if gated else x.shape[1]
    rows, constexprs, options = _rows(x, size, blocks)
    quantize_rows_kernel[(len(x),)](x, *rows, len(x), **constexprs, GATED=gated, **options, **FUSED)
    return rows


def norm_rows(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, blocks: bool = False) -> Float8Rows:
    """``rms_norm``, and with a ``residual`` ``add_rms_norm``; x, residual [M, I], contiguous."""
    rows, constexprs, options = _rows(x, x.shape[1], blocks)
    norm_rows_kernel[(len(x),)](x, residual, weight, *rows, len(x), **constexprs, EPS=eps, **options, **FUSED)
    return rows


def _rows(x: Tensor, size: int, blocks: bool) -> tuple[Float8Rows, dict[str, Any], dict[str, Any]]:
    """Rows to write, compile-time arguments and launch options."""
    assert x.is_contiguous()
    codes = x.new_empty(len(x), size, dtype=torch.float8_e4m3fn)
    shape = (triton.cdiv(size, 128), len(x)) if blocks else (len(x), 1)
    scales = x.new_empty(shape, dtype=torch.float32)
    constexprs, num_warps = rows_variant(size)
    options = {"num_warps": num_warps, **overlap_options(x.device)}
    return Float8Rows(codes, scales.T if blocks else scales), constexprs | {"BLOCKS": blocks}, options


def rows_variant(size: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``."""
    block = max(128, triton.next_power_of_2(size))
    return {"K": size, "BLOCK_K": block}, min(16, max(1, block // 512))
