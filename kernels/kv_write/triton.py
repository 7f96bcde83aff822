"""Writes K and V of a step's tokens into dense pages, in one launch.

Shapes:  k, v [N, H, D], any strides of the outer dims;  rows [N, 2] int64, as ``rope_kv_write.token_rows`` has them:
         the row of a token's K in head 0 of layer 0, -1 for none, and the rows between heads;  pages [R, D]
Grid:    (N,)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["layer"])
def kv_write_kernel(
    k_ptr,
    stride_k_n,
    stride_k_h,
    v_ptr,
    stride_v_n,
    stride_v_h,
    rows_ptr,
    pages_ptr,
    layer,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + 2 * i_n)
    if row < 0:
        return
    stride = tl.load(rows_ptr + 2 * i_n + 1)
    o_h, o_d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    b_side = (o_h < H) & (o_d < D)
    b_k = tl.load(k_ptr + i_n * stride_k_n + o_h * stride_k_h + o_d, mask=b_side)
    b_v = tl.load(v_ptr + i_n * stride_v_n + o_h * stride_v_h + o_d, mask=b_side)
    p_k = pages_ptr + (row + (2 * layer * H + o_h) * stride) * D + o_d
    tl.store(p_k, b_k.to(pages_ptr.dtype.element_ty), mask=b_side)
    tl.store(p_k + H * stride * D, b_v.to(pages_ptr.dtype.element_ty), mask=b_side)


def kv_write_triton(k: Tensor, v: Tensor, rows: Tensor, pages: Tensor, layer: int) -> None:
    """Stores ``k`` and ``v`` of one layer where ``rows`` says; all of them in the pages' dtype."""
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == 1
    kv_write_kernel[(num_tokens,)](
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        rows,
        pages,
        layer,
        H=num_heads,
        D=head_dim,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
