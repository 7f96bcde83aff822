"""Demotion of a head of a uniform side in Triton: packed words to packed words, metadata copied."""

from __future__ import annotations

import triton
import triton.language as tl

from ..copy_triton import copy_bytes


@triton.jit
def demote_head(
    p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD: tl.constexpr, NEW: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    p_codes += i_h * OLD.CODES
    p_to_codes += i_h * NEW.CODES
    if NEW.BITS == OLD.BITS or NEW.CODES == 0:
        copy_bytes(p_codes, p_to_codes, NEW.CODES)
    elif NEW.BITS == 1:
        _keep_one_bit(p_codes, p_to_codes, OLD.BITS, OLD.IS_K, T, D, TILE_D)
    else:
        _shrink_planes(p_codes, p_to_codes, OLD.BITS, NEW.BITS, OLD.IS_K, T, D, TILE_D)
    copy_bytes(p_meta + i_h * OLD.META, p_to_meta + i_h * NEW.META, OLD.META)
    p_top = (p_meta + OLD.TOP).to(tl.pointer_type(tl.uint16)) + i_h
    tl.store((p_to_meta + NEW.TOP).to(tl.pointer_type(tl.uint16)) + i_h, tl.load(p_top))


@triton.jit
def _shrink_planes(
    p_from, p_to, FROM_BITS: tl.constexpr, TO_BITS: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Plane f of source lanes [r * LANES, (r + 1) * LANES) becomes plane f * RUNS + r of the target's LANES lanes.

    Four bytes at a time: neighbours in the rows of K, which follow one another, neighbouring lanes of V.
    """
    LANES: tl.constexpr = T * TO_BITS // 8
    RUNS: tl.constexpr = FROM_BITS // TO_BITS
    p_from = p_from.to(tl.pointer_type(tl.int32))
    p_to = p_to.to(tl.pointer_type(tl.int32))
    if IS_K:
        o_from = tl.arange(0, LANES * TILE_D // 4)
        o_to = o_from
        m_word = o_from < LANES * D // 4
    else:
        o_d = tl.arange(0, TILE_D)[:, None]
        o_word = tl.arange(0, LANES // 4)[None, :]
        o_from = o_d * (LANES * RUNS // 4) + o_word
        o_to = o_d * (LANES // 4) + o_word
        m_word = o_d < D
    b_words = tl.zeros_like(o_from)
    for r in tl.static_range(RUNS):
        b_from = tl.load(p_from + o_from + r * LANES * (D if IS_K else 1) // 4, mask=m_word, other=0)
        for f in tl.static_range(8 // FROM_BITS):
            b_codes = b_from
            if FROM_BITS < 8:
                b_codes = (b_from >> f * FROM_BITS) & (0x01010101 * ((1 << FROM_BITS) - 1))
            b_words |= _shrink_bytes(b_codes, FROM_BITS, TO_BITS) << (f * RUNS + r) * TO_BITS
    tl.store(p_to + o_to, b_words, mask=m_word)


@triton.jit
def _shrink_bytes(b_codes, FROM_BITS: tl.constexpr, TO_BITS: tl.constexpr):
    """Four codes a word, one a byte, by halves: X_b = ((2^b - 1)(X_2b + 2^(b-1) + 1)) >> 2b, in 3b bits of room."""
    if FROM_BITS == 8:
        b_even = ((b_codes & 0x00FF00FF) + 0x00090009) * 15
        b_odd = (((b_codes >> 8) & 0x00FF00FF) + 0x00090009) * 15
        b_codes = ((b_even >> 8) & 0x000F000F) | (b_odd & 0x0F000F00)
    if FROM_BITS >= 4 and TO_BITS == 2:
        b_codes = (((b_codes + 0x03030303) * 3) >> 4) & 0x03030303
    return b_codes


@triton.jit
def _keep_one_bit(
    p_from, p_to, FROM_BITS: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr
):
    """Bit 4 h + j of a byte is token tile j of channel half h: its code's highest bit, whichever width it has.

    X_8 >= 128, X_4 >= 8 and X_2 >= 2 say the same, since demotion does not depend on the steps taken. ``WORD`` bytes
    at a time: neighbouring channels of K, neighbouring lanes of V.
    """
    WORD: tl.constexpr = 4 if D % 8 == 0 else 1
    ONES: tl.constexpr = 0x01010101 if WORD == 4 else 1
    LANES: tl.constexpr = T // 4
    FROM_LANES: tl.constexpr = T * FROM_BITS // 8
    PLANE_TILES: tl.constexpr = FROM_LANES // LANES  # token tiles of a plane
    dtype: tl.constexpr = tl.int32 if WORD == 4 else tl.uint8
    p_from, p_to = p_from.to(tl.pointer_type(dtype)), p_to.to(tl.pointer_type(dtype))
    # Words to the other half of the channels, and to the next token tile.
    HALF: tl.constexpr = D // 2 * (1 if IS_K else FROM_LANES) // WORD
    TILE: tl.constexpr = LANES * (D if IS_K else 1) // WORD
    if IS_K:
        o_row, o_word = tl.arange(0, LANES)[:, None], tl.arange(0, TILE_D // WORD)[None, :]
        m_word = o_word < D // 2 // WORD
        o_to = o_row * (D // 2 // WORD) + o_word
        o_from = o_row * (D // WORD) + o_word
    else:
        o_row, o_word = tl.arange(0, TILE_D)[:, None], tl.arange(0, LANES // WORD)[None, :]
        m_word = o_row < D // 2
        o_to = o_row * (LANES // WORD) + o_word
        o_from = o_row * (FROM_LANES // WORD) + o_word
    b_bits = tl.zeros_like(o_from)
    for h in tl.static_range(2):
        for j in tl.static_range(4):
            p_tile = p_from + h * HALF + j % PLANE_TILES * TILE
            b_codes = tl.load(p_tile + o_from, mask=m_word, other=0).to(tl.int32)
            b_bits |= ((b_codes >> (j // PLANE_TILES + 1) * FROM_BITS - 1) & ONES) << 4 * h + j
    tl.store(p_to + o_to, b_bits.to(dtype), mask=m_word)
