"""Tile loader of graded sides, dequantized."""

from __future__ import annotations

import triton
import triton.language as tl

from ..uniform.codes_triton import load_codes
from ..uniform.integer_channels import run_of
from ..uniform.integer_tiles import count


@triton.jit
def load_tile(
    p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``; x = min + (ETA + (1 - 2 ETA) code / (2^BITS - 1)) range, or the mean."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = b_t[:, None] & (o_d < D)[None, :]
    p_codes, p_meta = p_codes + i_h * SIDE.CODES, (p_meta + i_h * SIDE.META).to(tl.pointer_type(tl.float16))
    m_coded = o_d < SIDE.CODED
    o_low = tl.where(m_coded, o_d, SIDE.CODED + o_d)  # means lie behind the ranges
    b_low = tl.load(p_meta + o_low, mask=o_d < D, other=0.0).to(tl.float32)
    b_span = tl.load(p_meta + SIDE.CODED + o_d, mask=m_coded, other=0.0).to(tl.float32)
    b_x = tl.zeros([o_t.shape[0], BLOCK_D], tl.float32)
    for i in tl.static_range(count(SIDE.RUNS)):
        b_x += run_tile(p_codes, b_span, o_t, o_d, m_x, run_of(SIDE, i), SIDE.IS_K, T)
    return tl.where(m_x, b_x + b_low[None, :], 0.0).to(DTYPE)


@triton.jit
def run_tile(p_codes, b_span, o_t, o_d, m_x, RUN: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr):
    """Values above the minima in the channels of a run, elsewhere 0: [TILE, BLOCK_D] float32."""
    STEP: tl.constexpr = (1.0 - 2.0 * RUN.ETA) / (2**RUN.BITS - 1)
    o_run = o_d - RUN.FIRST
    m_run = (o_run >= 0) & (o_run < RUN.CHANNELS)
    b_span = tl.where(m_run, b_span, 0.0)[None, :]
    b_codes = load_codes(p_codes + RUN.CODES, o_t, o_run, m_x & m_run[None, :], RUN.BITS, IS_K, T, RUN.CHANNELS)
    b_x = b_codes.to(tl.float32) * (b_span * STEP)
    return b_x + b_span * RUN.ETA if RUN.ETA > 0 else b_x
