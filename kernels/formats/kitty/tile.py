"""Tile loader of Kitty sides, dequantized."""

from __future__ import annotations

import triton
import triton.language as tl

from ..uniform.codes_triton import load_codes


@triton.jit
def load_tile(
    p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``; x = min + code * range / 15 in boosted channels, / 3 in others."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = b_t[:, None] & (o_d < D)[None, :]
    p_codes, p_meta = p_codes + i_h * SIDE.CODES, p_meta + i_h * SIDE.META
    p_pairs = p_meta.to(tl.pointer_type(tl.float16)) + o_d
    b_low = tl.load(p_pairs, mask=o_d < D, other=0.0).to(tl.float32)
    b_range = tl.load(p_pairs + D, mask=o_d < D, other=0.0)
    b_boosted = (b_range.to(tl.int16, bitcast=True) < 0).to(tl.int32)
    b_range = b_range.to(tl.float32)
    is_boosted = b_boosted[None, :] != 0
    o_slot = (tl.cumsum(b_boosted, 0) - 1)[None, :]
    b_codes = load_codes(p_codes, o_t, o_d, m_x, 2, True, T, D)
    p_high = p_codes + T // 4 * D + (o_t % (T // 4) * SIDE.BOOSTED)[:, None] + o_slot
    b_high = tl.load(p_high, mask=m_x & is_boosted, other=0).to(tl.int32) >> (o_t // (T // 4) * 2)[:, None] & 3
    b_step = tl.maximum(b_range * (1 / 3), b_range * (-1 / 15))
    b_x = b_low[None, :] + (b_codes + b_high * 4).to(tl.float32) * b_step[None, :]
    return tl.where(m_x, b_x, 0.0).to(DTYPE)
