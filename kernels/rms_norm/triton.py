"""RMSNorm in Triton: one program a row, or a few rows where they are short; a row is read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..linear.float8_rows import Float8Rows
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..product_parts import quantize_tile


@triton.jit(do_not_specialize=["N"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, N,
    E: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm of ROWS rows of ``x``, or with ADD of ``x + residual``, which then replaces ``residual``.

    With ``scales`` the norm, rounded, is divided by them, and ``out`` has 8-bit floats.

    Shapes:  x, residual, out [N, E];  weight [E];  scales [N] or None
    Grid:    (cdiv(N, ROWS),)
    """
    let_next_start(OVERLAP)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    b_weight = tl.load(weight_ptr + o_e, mask=m_e, other=0.0)  # not written by the kernel before
    wait_for_previous(OVERLAP)
    o_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_x = (o_n < N)[:, None] & m_e[None, :]
    o_x = o_n[:, None] * E + o_e[None, :]
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


def rms_norm_triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See ``rms_norm``, and ``add_rms_norm`` for a ``residual``."""
    out = torch.empty_like(x)
    _launch(x, residual, weight, eps, out, None)
    return out


def rms_norm_float8(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Float8Rows:
    """``quantize_rows(rms_norm_triton(x, residual, weight, eps))``, its bits, in one kernel."""
    rows = Float8Rows(torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32))
    _launch(x, residual, weight, eps, *rows)
    return rows


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    num_rows, size = x.shape
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    constexprs, num_warps = rms_norm_variant(size, eps, add=residual is not None)
    options = {"num_warps": num_warps, **overlap_options(x.device)}
    rms_norm_kernel[(triton.cdiv(num_rows, constexprs["ROWS"]),)](
        x, residual, weight, out, scales, num_rows, **constexprs, **options, **FUSED
    )


def rms_norm_variant(size: int, eps: float, *, add: bool) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``; the number of rows never matters to a row's result."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    constexprs = {"E": size, "EPS": eps, "ADD": add, "ROWS": rows, "BLOCK_E": block}
    return constexprs, min(16, max(1, rows * block // 512))  # 16 elements a thread: two loads of 16 bytes
