"""Tile loader of graded sides, dequantized."""

from __future__ import annotations

import triton
import triton.language as tl

from ..uniform.codes_triton import load_codes


@triton.constexpr_function
def num_runs(side):
    """The number of runs of a side."""
    return len(side.RUNS)


@triton.constexpr_function
def run_of(side, i):
    """The record of run ``i``."""
    return side.RUNS[i]


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
    for i in tl.static_range(num_runs(SIDE)):
        RUN: tl.constexpr = run_of(SIDE, i)
        STEP: tl.constexpr = (1.0 - 2.0 * RUN.ETA) / (2**RUN.BITS - 1)
        o_run = o_d - RUN.FIRST
        m_run = (o_run >= 0) & (o_run < RUN.CHANNELS)
        m_codes = m_x & m_run[None, :]
        b_codes = load_codes(p_codes + RUN.CODES, o_t, o_run, m_codes, RUN.BITS, SIDE.IS_K, T, RUN.CHANNELS)
        b_step = tl.where(m_run, b_span * STEP, 0.0)
        b_x += b_codes.to(tl.float32) * b_step[None, :] + tl.where(m_run, b_span * RUN.ETA, 0.0)[None, :]
    return tl.where(m_x, b_x + b_low[None, :], 0.0).to(DTYPE)
