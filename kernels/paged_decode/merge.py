"""Joins the parts of each request's decode attention by their log-sum-exps.

out[b, h] = sum_p w_p o_p / sum_p w_p,  w_p = 2^(lse_p - max lse)

Shapes:  o [parts, HQ, D] float32;  lse [parts, HQ] float32, log2, -inf for an empty part;  out [B, HQ, D]
Grid:    (B, HQ); one program per request and query head, BLOCK_P parts a step
Source:  flash-decoding split-KV
"""

import triton
import triton.language as tl

from ..overlap import begin_overlap, end_overlap


@triton.jit
def merge_kernel(
    o_ptr,
    lse_ptr,
    part_first_ptr,
    out_ptr,
    stride_out_b,
    stride_out_h,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlap(OVERLAP)
    end_overlap(OVERLAP)
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HQ = tl.num_programs(1)
    o_d = tl.arange(0, BLOCK_D)
    first = tl.load(part_first_ptr + i_b)
    last = tl.load(part_first_ptr + i_b + 1)
    b_m = tl.full([1], -1e30, tl.float32)
    b_l = tl.zeros([1], tl.float32)
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for i_p in range(first, last, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P)
        row = o_p.to(tl.int64) * HQ + i_h
        b_lse = tl.load(lse_ptr + row, mask=o_p < last, other=float("-inf"))
        b_o = tl.load(
            o_ptr + row[:, None] * D + o_d[None, :],
            mask=(o_p < last)[:, None] & (o_d < D)[None, :],
            other=0.0,
        )
        b_top = tl.maximum(b_m, tl.max(b_lse, 0))
        b_w = tl.exp2(b_lse - b_top)
        b_shrink = tl.exp2(b_m - b_top)
        b_l = b_l * b_shrink + tl.sum(b_w, 0)
        b_acc = b_acc * b_shrink + tl.sum(b_o * b_w[:, None], 0)
        b_m = b_top
    p_out = out_ptr + i_b * stride_out_b + i_h * stride_out_h + o_d
    tl.store(p_out, (b_acc / tl.maximum(b_l, 1e-30)).to(out_ptr.dtype.element_ty), mask=o_d < D)
