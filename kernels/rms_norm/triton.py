"""RMSNorm in Triton: one program a row, or a few rows where they are short; a row is read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..linear.float8_rows import Float8Rows
from ..linear.split_sums import SplitSums
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..product_parts import add_sums, quantize_tile


@triton.jit(do_not_specialize=["N"])
def rms_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, N,
    E: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm of ROWS rows of ``x``, or with ADD of ``x + residual``, which then replaces ``residual``.

    With ``scales`` the norm, rounded, is divided by them, and ``out`` has 8-bit floats. With SPLITS ``x`` is the sum
    of as many and of ``bias``, rounded.

    Shapes:  x, residual, out [N, E], with SPLITS x float32 [SPLITS, N, E];  bias [E] or None;  weight [E]
             scales [N] or None
    Grid:    (cdiv(N, ROWS),)
    """
    let_next_start(OVERLAP)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    b_weight = tl.load(weight_ptr + o_e, mask=m_e, other=0.0)  # not written by the kernel before, nor a bias
    b_bias = tl.zeros([BLOCK_E], tl.float32)
    if bias_ptr is not None:
        b_bias += tl.load(bias_ptr + o_e, mask=m_e, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    o_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_x = (o_n < N)[:, None] & m_e[None, :]
    o_x = o_n[:, None] * E + o_e[None, :]
    if SPLITS > 1:
        b_sum = tl.zeros([ROWS, BLOCK_E], tl.float32) + b_bias[None, :]
        b_x = add_sums(b_sum, x_ptr + o_x, m_x, N * E, SPLITS).to(residual_ptr.dtype.element_ty)
    else:
        b_x = tl.load(x_ptr + o_x, mask=m_x, other=0.0)
    if ADD:
        b_residual = tl.load(residual_ptr + o_x, mask=m_x, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(b_x.dtype)
        tl.store(residual_ptr + o_x, b_x, mask=m_x)
    b_wide = b_x.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, 1) / E + EPS)
    b_out = (b_wide * b_scale[:, None]).to(b_x.dtype).to(tl.float32) * b_weight.to(tl.float32)[None, :]
    if scales_ptr is None:
        tl.store(out_ptr + o_x, b_out.to(b_x.dtype), mask=m_x)
    else:
        b_codes, b_norm_scale = quantize_tile(b_out.to(b_x.dtype).to(tl.float32))
        tl.store(out_ptr + o_x, b_codes, mask=m_x)
        tl.store(scales_ptr + o_n, b_norm_scale, mask=o_n < N)


def rms_norm_triton(x: Tensor | SplitSums, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See ``rms_norm``, and ``add_rms_norm`` for a ``residual``."""
    out = torch.empty_like(_summed(x, residual))
    _launch(x, residual, weight, eps, out, None)
    return out


def rms_norm_float8(x: Tensor | SplitSums, residual: Tensor | None, weight: Tensor, eps: float) -> Float8Rows:
    """``quantize_rows(rms_norm_triton(x, residual, weight, eps))``, its bits, in one kernel."""
    summed = _summed(x, residual)
    codes = torch.empty_like(summed, dtype=torch.float8_e4m3fn)
    rows = Float8Rows(codes, summed.new_empty(len(summed), 1, dtype=torch.float32))
    _launch(x, residual, weight, eps, *rows)
    return rows


def _summed(x: Tensor | SplitSums, residual: Tensor | None) -> Tensor:
    """Where what is normed lies: [N, E] in its dtype."""
    if residual is not None:
        return residual
    assert isinstance(x, Tensor)
    return x


def _launch(
    x: Tensor | SplitSums, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None
) -> None:
    rows, bias = x if isinstance(x, SplitSums) else (x, None)
    (num_rows, size), splits = out.shape, len(rows) if isinstance(x, SplitSums) else 1
    assert rows.is_contiguous() and (residual is None or residual.is_contiguous())
    constexprs, num_warps = rms_norm_variant(size, eps, add=residual is not None, splits=splits)
    options = {"num_warps": num_warps, **overlap_options(out.device)}
    rms_norm_kernel[(triton.cdiv(num_rows, constexprs["ROWS"]),)](
        rows, bias, residual, weight, out, scales, num_rows, **constexprs, **options, **FUSED
    )


def rms_norm_variant(size: int, eps: float, *, add: bool, splits: int = 1) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``; the number of rows never matters to a row's result."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    constexprs = {"E": size, "EPS": eps, "ADD": add, "SPLITS": splits, "ROWS": rows, "BLOCK_E": block}
    return constexprs, min(16, max(1, rows * block // 512))  # 16 elements a thread: two loads of 16 bytes
