"""Activations as 8-bit floats in Triton, with a scale a row or for each 128 columns of one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..product_parts import quantize_by, quantize_tile, scale_of, swiglu_tile
from .codes import BLOCK


class Float8Rows(NamedTuple):
    """Rows of 8-bit floats: codes float8_e4m3fn [M, I].

    ``scales`` float32 [M, 1], or a scale for each 128 columns, [M, ceil(I / 128)] with strides (1, M).
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Numbers of rows and columns."""
        return self.codes.shape


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
    b_codes, b_scale = quantize_tile(b_wide)
    tl.store(codes_ptr + i_m * K + o_k, tl.reshape(b_codes, [BLOCK_K]), mask=o_k < K)
    o_scale = tl.arange(0, SCALES)
    tl.store(scales_ptr + o_scale * M + i_m, b_scale, mask=o_scale * COLUMNS < K)


@triton.jit
def swiglu_rows_kernel(
    gate_up_ptr, out_ptr, scales_ptr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``swiglu(gate_up) / scales``, the results and the roundings of ``swiglu_kernel`` and ``quantize_rows_kernel``.

    Shapes:  gate_up [M, 2 K];  out [M, K];  scales [M]
    Grid:    (M,)
    """
    let_next_start(OVERLAP)
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    i_m, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    p_gate, p_out = gate_up_ptr + i_m * (2 * K) + o_k, out_ptr + i_m * K + o_k
    wait_for_previous(OVERLAP)
    outs = ()  # of 16 bits, so that a row takes few registers
    b_top = tl.zeros([BLOCK_K], tl.float32)
    for part in tl.static_range(PARTS):
        p, m = p_gate + part * BLOCK_K, o_k < K - part * BLOCK_K
        b_out = swiglu_tile(tl.load(p, mask=m, other=0.0), tl.load(p + K, mask=m, other=0.0))
        b_top = tl.maximum(b_top, tl.abs(b_out.to(tl.float32)))
        outs += (b_out,)  # type: ignore[assignment]
    b_scale = scale_of(tl.max(b_top, 0))
    tl.store(scales_ptr + i_m, b_scale)
    for part in tl.static_range(PARTS):
        b_codes = quantize_by(outs[part].to(tl.float32), b_scale)
        tl.store(p_out + part * BLOCK_K, b_codes, mask=o_k < K - part * BLOCK_K)


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


def swiglu_rows(gate_up: Tensor) -> Float8Rows:
    """``quantize_rows(swiglu(gate_up))``, its bits, in one kernel; gate_up [M, 2 I], contiguous."""
    assert gate_up.is_contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    codes = gate_up.new_empty(num_rows, size, dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty(num_rows, 1, dtype=torch.float32)
    constexprs, num_warps = swiglu_rows_variant(size)
    options = {"num_warps": num_warps, **overlap_options(gate_up.device)}
    swiglu_rows_kernel[(num_rows,)](gate_up, codes, scales, **constexprs, **options, **FUSED)
    return Float8Rows(codes, scales)


def rows_variant(size: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``."""
    block = max(BLOCK, triton.next_power_of_2(size))
    return {"K": size, "BLOCK_K": block}, min(16, max(1, block // 512))


def swiglu_rows_variant(size: int) -> tuple[dict[str, Any], int]:
    """The same for rows of ``size`` results of SwiGLU: parts of which two programs fit a multiprocessor."""
    block = min(4096, triton.next_power_of_2(size))
    return {"K": size, "BLOCK_K": block}, min(8, max(1, block // 512))
