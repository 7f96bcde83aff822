"""Sealing a head of a uniform side in Triton, the whole [T, TILE_D] tile in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes_triton import shrink_codes, store_codes


@triton.jit
def seal_head(
    p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps`` for the arguments, ``reference.quantize`` for the arithmetic."""
    if SIDE.PER_TOKEN:
        b_codes, b_span = _seal_tokens(p_meta + i_h * SIDE.META, b_x, SIDE, T, D, TILE_D)
    else:
        b_codes, b_span = _seal_channels(p_meta + i_h * SIDE.META, b_x, SIDE, T, D, TILE_D)
    if SIDE.CODES > 0:
        store_codes(p_codes + i_h * SIDE.CODES, b_codes, SIDE.BITS, SIDE.IS_K, T, D, TILE_D)
    p_top = (p_meta + SIDE.TOP).to(tl.pointer_type(tl.float16)) + i_h
    tl.store(p_top, tl.max(tl.max(b_span.to(tl.float32), 1), 0).to(tl.float16))


@triton.jit
def _seal_channels(p_meta, b_x, SIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """Groups of tokens of one channel: (min, range) [2][groups][D]. Returns codes [T, TILE_D] and ranges."""
    b_x = tl.reshape(b_x, (SIDE.GROUPS, SIDE.GROUP, TILE_D))
    b_low, b_span = min_range(tl.min(b_x, 1), tl.max(b_x, 1))
    b_codes = quantize_codes(b_x, b_low.to(tl.float32)[:, None, :], b_span.to(tl.float32)[:, None, :], SIDE.BITS)
    o_g = tl.arange(0, SIDE.GROUPS)
    o_d = tl.arange(0, TILE_D)
    p_meta = p_meta.to(tl.pointer_type(tl.float16)) + o_g[:, None] * D + o_d[None, :]
    tl.store(p_meta, b_low, mask=o_d[None, :] < D)
    tl.store(p_meta + SIDE.GROUPS * D, b_span, mask=o_d[None, :] < D)
    return tl.reshape(b_codes, (T, TILE_D)), b_span


@triton.jit
def _seal_tokens(p_meta, b_x, SIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """Groups of channels of one token: (min, range) [groups][lanes][4 tiles][2]. Returns codes and ranges."""
    TILE_G: tl.constexpr = TILE_D if SIDE.GROUPS == 1 else SIDE.GROUP  # a single group may end before the tile does
    TILE_GROUPS: tl.constexpr = TILE_D // TILE_G
    o_d = tl.reshape(tl.arange(0, TILE_D), (1, TILE_GROUPS, TILE_G))
    m_d = o_d < D
    b_x = tl.reshape(b_x, (T, TILE_GROUPS, TILE_G))
    o_g = tl.arange(0, TILE_GROUPS)
    m_g = o_g[None, :] < SIDE.GROUPS
    b_min = tl.where(m_g, tl.min(tl.where(m_d, b_x, float("inf")), 2), 0.0)
    b_max = tl.where(m_g, tl.max(tl.where(m_d, b_x, float("-inf")), 2), 0.0)
    b_low, b_span = min_range(b_min, b_max)
    b_codes = quantize_codes(b_x, b_low.to(tl.float32)[:, :, None], b_span.to(tl.float32)[:, :, None], SIDE.BITS)
    o_t = tl.arange(0, T)
    o_pair = (o_t % (T // 4) * 4 + o_t // (T // 4))[:, None]
    p_meta = p_meta.to(tl.pointer_type(tl.float16)) + 2 * (o_g[None, :] * T + o_pair)
    tl.store(p_meta, b_low, mask=m_g)
    tl.store(p_meta + 1, b_span, mask=m_g)
    return tl.reshape(b_codes, (T, TILE_D)), b_span


@triton.jit
def min_range(b_min, b_max):
    """min rounded down and range rounded up to fp16, so that every value lies within them."""
    b_min = b_min + 0.0  # -0 becomes +0
    b_low = b_min.to(tl.float16)
    bits = b_low.to(tl.int16, bitcast=True)
    below = tl.where(bits < 0, bits + 1, bits - 1).to(tl.int16)
    b_low = tl.where(b_low.to(tl.float32) > b_min, below, bits).to(tl.float16, bitcast=True)
    b_range = b_max - b_low.to(tl.float32)
    b_span = b_range.to(tl.float16)
    bits = b_span.to(tl.int16, bitcast=True)
    above = (bits + 1).to(tl.int16)
    b_span = tl.where(b_span.to(tl.float32) < b_range, above, bits).to(tl.float16, bitcast=True)
    return b_low, b_span


@triton.jit
def quantize_codes(b_x, b_low, b_span, BITS: tl.constexpr):
    """Codes of ``b_x`` as int32; minima and ranges are float32 and broadcast with it."""
    b_divisor = tl.where(b_span > 0, b_span, 1.0)
    b_inverse = tl.math.div_rn(tl.full(b_divisor.shape, 1.0, tl.float32), b_divisor)
    b_scaled = (b_x - b_low) * (7.0 if BITS == 3 else 255.0)
    # The quotient, rounded once: the divisor has eleven bits, so no quotient is so near the middle of two floats that
    # one correction by the exact rest could miss.
    b_level = b_scaled * b_inverse
    b_level = tl.fma(tl.fma(-b_level, b_divisor, b_scaled), b_inverse, b_level)
    # Adding 1.5 * 2^23 rounds to the nearest integer, halves to even, and leaves it in the low bits.
    b_codes = (b_level + 12582912.0).to(tl.int32, bitcast=True) & 255
    return b_codes if BITS == 3 else shrink_codes(b_codes, 8, BITS)
