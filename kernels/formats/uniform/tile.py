"""Tile loader of uniform sides, dequantized: every number of bits, axis and group."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes_triton import load_codes


@triton.jit
def load_tile(
    p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``; x = min + (ETA + (1 - 2 ETA) code / (2^BITS - 1)) range."""
    STEP: tl.constexpr = (1.0 - 2.0 * SIDE.ETA) / (2**SIDE.BITS - 1)
    o_d = tl.arange(0, BLOCK_D)
    m_x = b_t[:, None] & (o_d < D)[None, :]
    b_codes = load_codes(p_codes + i_h * SIDE.CODES, o_t, o_d, m_x, SIDE.BITS, SIDE.IS_K, T, D)
    p_meta = (p_meta + i_h * SIDE.META).to(tl.pointer_type(tl.float16))
    if SIDE.PER_TOKEN:
        o_pair = (o_t % (T // 4) * 4 + o_t // (T // 4))[:, None] + (o_d // SIDE.GROUP * T)[None, :]
        p_low = p_meta + 2 * o_pair
        p_span = p_low + 1
    else:
        p_low = p_meta + (o_t // SIDE.GROUP * D)[:, None] + o_d[None, :]
        p_span = p_low + SIDE.GROUPS * D
    b_low = tl.load(p_low, mask=m_x, other=0.0).to(tl.float32)
    b_span = tl.load(p_span, mask=m_x, other=0.0).to(tl.float32)
    b_low = b_low + b_span * SIDE.ETA if SIDE.ETA > 0 else b_low
    return (b_low + b_codes.to(tl.float32) * (b_span * STEP)).to(DTYPE)
