"""Matrix product in Triton with one tile for any number of rows, so that a row's bits do not depend on the others.

The tile has 64 rows: an H100 multiplies as many in the time in which a large weight is read. Few rows leave most of it
empty, many take several tiles, and the columns are summed in the same order in all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..product_parts import load_bias, load_columns, weight_rows

BLOCK_M, BLOCK_K = 64, 64
WIDE_OUT = 8192  # rows of a weight from which on a program has 64 of them: smaller weights want many programs


class SteadyTuning(NamedTuple):
    """Launch parameters of ``linear_steady_kernel``, which may depend on the weight, and never on the rows."""

    block_n: int
    block_k: int = BLOCK_K
    num_warps: int = 4
    num_stages: int = 4


@triton.jit(do_not_specialize=["M"])
def linear_steady_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, N, M,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``.

    Shapes:  x [M, K];  weight [N, K];  bias [N] or None;  out [M, N]
    Grid:    (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)): programs that read the same rows of the weight follow one another
    """
    let_next_start(OVERLAP)
    o_m, o_k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    i_n = tl.program_id(1)
    o_n = weight_rows(i_n, N, False, False, BLOCK_N)
    b_bias = load_bias(bias_ptr, o_n)
    p_weight, p_x, m_m = weight_ptr + o_n[:, None] * K, x_ptr + o_m[:, None] * K, (o_m < M)[:, None]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_previous(OVERLAP)

    for i in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        b_weight = load_columns(p_weight, i + o_k[None, :], K, BLOCK_K, "")
        m_x = m_m if K % BLOCK_K == 0 else m_m & (i + o_k < K)[None, :]
        b_x = tl.load(p_x + i + o_k[None, :], mask=m_x, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_weight), b_acc, input_precision="ieee")

    o_out = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_out = (b_acc + b_bias[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o_m[:, None] * N + o_out[None, :], b_out, mask=m_m & (o_out < N)[None, :])


def linear_steady(x: Tensor, weight: Tensor, bias: Tensor | None = None, tuning: SteadyTuning | None = None) -> Tensor:
    """See ``qkv_engine.kernels.linear.linear``; a row of the result has the same bits whatever rows are beside it."""
    (num_rows, size), num_out = x.shape, len(weight)
    x, out = x.contiguous(), x.new_empty(num_rows, num_out)
    assert weight.is_contiguous() and weight.shape[1] == size
    if not num_rows:
        return out
    constexprs, num_warps = steady_variant(num_out, size, x.dtype.itemsize, tuning)
    grid = (triton.cdiv(num_rows, constexprs["BLOCK_M"]), triton.cdiv(num_out, constexprs["BLOCK_N"]))
    linear_steady_kernel[grid](
        x, weight, bias, out, num_out, num_rows, **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED
    )
    return out


def steady_variant(
    num_out: int, size: int, itemsize: int, tuning: SteadyTuning | None = None
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for a weight [num_out, size] of elements of ``itemsize`` bytes."""
    if tuning is None:
        tuning = SteadyTuning(64 if num_out >= WIDE_OUT else 32)
        if itemsize == 4:  # float32 dots have no matrix instructions and take every register
            tuning = SteadyTuning(32, block_k=32, num_warps=8, num_stages=2)
    constexprs = {"BLOCK_M": BLOCK_M, "BLOCK_N": tuning.block_n, "BLOCK_K": tuning.block_k, "STAGES": tuning.num_stages}
    return {"K": size, **constexprs}, tuning.num_warps
