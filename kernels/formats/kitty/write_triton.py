"""Writing a head of a Kitty side in Triton, from elements or from a wider uniform side: ranking in the same program."""

from __future__ import annotations

import triton
import triton.language as tl

from ..uniform.codes_triton import join_planes, load_codes, shrink_codes, store_codes
from ..uniform.seal_triton import min_range, quantize_codes
from .rank_triton import choose_channels


@triton.jit
def seal_head(
    p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    b_low, b_span = min_range(tl.min(b_x, 0), tl.max(b_x, 0))
    b_codes = quantize_codes(b_x, b_low.to(tl.float32)[None, :], b_span.to(tl.float32)[None, :], 4)
    _write_head(p_codes, p_meta, b_codes, b_low, b_span, i_h, SIDE, T, D, TILE_D)


@triton.jit
def demote_head(
    p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD: tl.constexpr, NEW: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``; ``OLD`` is uniform, of 8 or 4 bits, in one group a channel."""
    o_t, o_d = tl.arange(0, T), tl.arange(0, TILE_D)
    m_x = tl.broadcast_to((o_d < D)[None, :], (T, TILE_D))
    b_codes = shrink_codes(load_codes(p_codes + i_h * OLD.CODES, o_t, o_d, m_x, OLD.BITS, True, T, D), OLD.BITS, 4)
    p_pairs = (p_meta + i_h * OLD.META).to(tl.pointer_type(tl.float16))
    b_low = tl.load(p_pairs + o_d, mask=o_d < D, other=0.0)
    b_span = tl.load(p_pairs + D + o_d, mask=o_d < D, other=0.0)
    _write_head(p_to_codes, p_to_meta, b_codes, b_low, b_span, i_h, NEW, T, D, TILE_D)


@triton.jit
def _write_head(
    p_codes, p_meta, b_codes, b_low, b_span, i_h, SIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """Codes of 4 bits [T, TILE_D] int32 and (min, range) [TILE_D] fp16 as the bytes of head ``i_h``."""
    LANES: tl.constexpr = T // 4
    o_d = tl.arange(0, TILE_D)
    b_boosted = choose_channels(b_codes, b_low, b_span, SIDE, D, TILE_D)
    b_slot = tl.cumsum(b_boosted, 0) - 1
    p_codes += i_h * SIDE.CODES
    b_base = tl.where(b_boosted[None, :] != 0, b_codes & 3, shrink_codes(b_codes, 4, 2))
    store_codes(p_codes, b_base, 2, True, T, D, TILE_D)
    b_high = join_planes(b_codes >> 2, 2, LANES, TILE_D).to(tl.uint8)
    o_high = tl.arange(0, LANES)[:, None] * SIDE.BOOSTED + b_slot[None, :]
    tl.store(p_codes + LANES * D + o_high, b_high, mask=b_boosted[None, :] != 0)
    p_top = (p_meta + SIDE.TOP).to(tl.pointer_type(tl.float16)) + i_h
    tl.store(p_top, tl.max(b_span.to(tl.float32), 0).to(tl.float16))
    p_meta += i_h * SIDE.META
    p_pairs = p_meta.to(tl.pointer_type(tl.float16))
    tl.store(p_pairs + o_d, b_low, mask=o_d < D)
    b_bits = b_span.to(tl.int16, bitcast=True)
    b_bits = tl.where(b_boosted != 0, b_bits | -32768, b_bits).to(tl.int16)
    tl.store((p_pairs + D + o_d).to(tl.pointer_type(tl.int16), bitcast=True), b_bits, mask=o_d < D)
    tl.store(p_meta + SIDE.NUMBERS + b_slot, o_d.to(tl.uint8), mask=b_boosted != 0)
    END: tl.constexpr = SIDE.NUMBERS + SIDE.BOOSTED
    o_pad = tl.arange(0, 16)
    tl.store(p_meta + END + o_pad, tl.zeros_like(o_pad).to(tl.uint8), mask=o_pad < SIDE.META - END)
