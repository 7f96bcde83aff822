"""Joins the parts of each request's decode attention by their log-sum-exps.

out[b, h] = sum_p w_p o_p / sum_p w_p,  w_p = 2^(lse_p - max lse); a null logit is a part without output

Shapes:  o [parts, HQ, D] float32;  lse [parts, HQ] float32, log2, -inf for an empty part;  out [B, HQ, D];
         null_logits [HQ], ``None`` without
Grid:    (B, cdiv(HQ, BLOCK_H)); one program per request and BLOCK_H query heads, BLOCK_P parts a step
Source:  flash-decoding split-KV
"""

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous
from ..soft_cap import LOG2_E


@triton.jit
def merge_kernel(
    o_ptr,
    lse_ptr,
    part_first_ptr,
    out_ptr,
    stride_out_b,
    stride_out_h,
    null_logits_ptr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_start(OVERLAP)
    i_b = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_h = o_h < HQ
    m_o = m_h[:, None] & (o_d < D)[None, :]
    first = tl.load(part_first_ptr + i_b)
    last = tl.load(part_first_ptr + i_b + 1)
    b_m = tl.full([BLOCK_H], -1e30, tl.float32)
    b_l = tl.zeros([BLOCK_H], tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if null_logits_ptr is not None:
        b_m = tl.load(null_logits_ptr + o_h, mask=m_h, other=0.0).to(tl.float32) * LOG2_E
        b_l = tl.full([BLOCK_H], 1.0, tl.float32)
    wait_for_previous(OVERLAP)
    for i_p in range(first, last, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P)
        m_p = o_p < last
        row = o_p.to(tl.int64)[:, None] * HQ + o_h[None, :]
        b_lse = tl.load(lse_ptr + row, mask=m_p[:, None] & m_h[None, :], other=float("-inf"))
        p_o = o_ptr + row[:, :, None] * D + o_d[None, None, :]
        b_o = tl.load(p_o, mask=m_p[:, None, None] & m_o[None, :, :], other=0.0)
        b_top = tl.maximum(b_m, tl.max(b_lse, 0))
        b_w = tl.exp2(b_lse - b_top[None, :])
        b_shrink = tl.exp2(b_m - b_top)
        b_l = b_l * b_shrink + tl.sum(b_w, 0)
        b_acc = b_acc * b_shrink[:, None] + tl.sum(b_o * b_w[:, :, None], 0)
        b_m = b_top
    p_out = out_ptr + i_b * stride_out_b + o_h[:, None] * stride_out_h + o_d[None, :]
    tl.store(p_out, (b_acc / tl.maximum(b_l, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=m_o)
