"""RMSNorm in Triton: one program a row, or a few rows where they are short; a row is read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous


@triton.jit(do_not_specialize=["N"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, N,
    E: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm of ROWS rows of ``x``, or with ADD of ``x + residual``, which then replaces ``residual``.

    Shapes:  x, residual, out [N, E];  weight [E]
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
    tl.store(out_ptr + o_x, b_out.to(b_x.dtype), mask=m_x)


def rms_norm_triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See ``rms_norm``, and ``add_rms_norm`` for a ``residual``."""
    num_rows, size = x.shape
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty_like(x)
    constexprs, num_warps = rms_norm_variant(size, eps, add=residual is not None)
    rms_norm_kernel[(triton.cdiv(num_rows, constexprs["ROWS"]),)](
        x, residual, weight, out, num_rows, **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED
    )
    return out


def rms_norm_variant(size: int, eps: float, *, add: bool) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size``; the number of rows never matters to a row's result."""
    block = triton.next_power_of_2(size)
    rows = max(1, 1024 // block)
    constexprs = {"E": size, "EPS": eps, "ADD": add, "ROWS": rows, "BLOCK_E": block}
    return constexprs, min(16, max(1, rows * block // 512))  # 16 elements a thread: two loads of 16 bytes
