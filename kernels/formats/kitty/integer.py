"""Integer decode functions of Kitty sides: dots on the 2-bit set of all channels and on that of boosted ones.

q . (low + c step) = unit (qi . base + 4 qi . high) + bias, as for uniform sides, where qi is q * range in fixed point,
over 5 in boosted channels. One int32 sum serves both sets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..family import KeyFunctions
from ..uniform.integer import (
    DOT_DEPTH,
    block_of,
    channel_parts,
    channel_query,
    count,
    field_place,
    key_dots,
    load_key_bytes,
    load_part,
    load_top,
)
from ..uniform.integer_codes import fixed_point, join8, join_tiles, split_rows, take_bits
from ..uniform.layout import TILES as MAX_TILES
from .layout import KittySide

# Queries of boosted channels come from registers, by shuffles; else from memory, by loads that nothing fetches ahead.
GATHER = tl.constexpr(True)


def integer_functions(side: KittySide) -> KeyFunctions | None:
    """The device functions of a side, or ``None`` for pages of another size than 128 tokens."""
    if side.shape.num_tokens != MAX_TILES * DOT_DEPTH:
        return None
    return KeyFunctions(boosted_query, boosted_scores, MAX_TILES)


@triton.constexpr_function
def high_place(place):
    """The bit at which high codes are left beside low ones at ``place``; they must fit an int8."""
    return min(place + 2, 4)


@triton.jit
def boosted_query(p_q, b_heads, scale, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """(q of each channel part as [channels, BLOCK_G], largest magnitude [BLOCK_G]); and its source for ``GATHER``."""
    query = channel_query(p_q, b_heads, scale, K, D, BLOCK_G)
    if not GATHER:
        query += (p_q, b_heads, scale)
    return query


@triton.jit
def load_boosted(p_mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Whether channels FIRST .. FIRST + COUNT - 1 are boosted, 0 or 1, padded with zeros."""
    o_d = tl.arange(0, block_of(COUNT))
    p_words = p_mask.to(tl.pointer_type(tl.int32), bitcast=True) + (FIRST + o_d) // 32
    b_words = tl.load(p_words) if block_of(COUNT) == COUNT else tl.load(p_words, mask=o_d < COUNT, other=0)
    return b_words >> (FIRST + o_d) % 32 & 1


@triton.jit
def load_numbers(p_numbers, BOOSTED: tl.constexpr):
    """Numbers of boosted channels, padded with -1; read four at a time, as only words are fetched ahead."""
    o_slot = tl.arange(0, block_of(BOOSTED))
    p_words = p_numbers.to(tl.pointer_type(tl.int32), bitcast=True) + o_slot // 4
    b_words = tl.load(p_words, mask=o_slot < BOOSTED, other=0)
    return tl.where(o_slot < BOOSTED, b_words >> o_slot % 4 * 8 & 255, -1)


@triton.jit
def scaled_query(query, b_fix, p_meta, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """(q * step of each channel part in fixed point, [channels, BLOCK_G] float32; bias [BLOCK_G])."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    p_lows = p_meta.to(tl.pointer_type(tl.float16), bitcast=True)
    scaled: tl.tuple = ()
    b_bias = tl.zeros([BLOCK_G], tl.float32)
    for i in tl.static_range(count(PARTS)):
        b_low = load_part(p_lows, i * (D // 2), PARTS[i])
        b_step = load_part(p_lows + D, i * (D // 2), PARTS[i])
        b_step *= tl.where(load_boosted(p_meta + K.MASK, i * (D // 2), PARTS[i]) != 0, 0.2, 1.0)
        b_bias += tl.sum(query[i] * b_low[:, None], 0)
        scaled += (query[i] * b_fix[None, :] * b_step[:, None],)
    return scaled, b_bias


@triton.jit
def gather_query(scaled, b_channel, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """The rows of ``scaled`` of channels ``b_channel`` [n], zero for -1: [n, BLOCK_G]."""
    b_x = tl.zeros([b_channel.shape[0], BLOCK_G], tl.float32)
    for i in tl.static_range(count(PARTS)):
        o_row = (b_channel - i * (D // 2))[:, None]
        m_row = (o_row >= 0) & (o_row < PARTS[i])
        b_part = tl.gather(scaled[i], tl.broadcast_to(tl.where(m_row, o_row, 0), b_x.shape), 0)
        b_x = tl.where(m_row, b_part, b_x)
    return b_x


@triton.jit
def load_query(p_q, b_heads, scale, b_fix, p_ranges, b_channel):
    """The same as ``gather_query``, from memory."""
    m_row = b_channel >= 0
    b_q = tl.load(p_q[None, :] + b_channel[:, None], mask=m_row[:, None] & b_heads[None, :], other=0.0)
    b_range = tl.load(p_ranges + b_channel, mask=m_row, other=0.0).to(tl.float32)
    return b_q.to(tl.float32) * scale * b_fix[None, :] * (b_range * 0.2)[:, None]


@triton.jit
def boosted_scores(
    query,
    p_codes,
    p_meta,
    i_h,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Scores of a page."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    N: tl.constexpr = count(PARTS)
    ROWS: tl.constexpr = T // TILES
    b_fix, b_unit = fixed_point(query[N] * load_top(p_meta + K.TOP, i_h), K.BITS)
    p_codes, p_meta = p_codes + i_h * K.CODES, p_meta + i_h * K.META
    scaled, b_bias = scaled_query(query, b_fix, p_meta, K, D, BLOCK_G)
    digits: tl.tuple = ()
    for i in tl.static_range(N):
        digits += (split_rows(scaled[i], block_of(PARTS[i]), BLOCK_G),)
    if K.BOOSTED > 0:
        b_channel = load_numbers(p_meta + K.NUMBERS, K.BOOSTED)
        if GATHER:
            b_high = gather_query(scaled, b_channel, PARTS, D, BLOCK_G)
        else:
            p_ranges = p_meta.to(tl.pointer_type(tl.float16), bitcast=True) + D
            b_high = load_query(query[N + 1], query[N + 2], query[N + 3], b_fix, p_ranges, b_channel)
        b_high = split_rows(b_high, block_of(K.BOOSTED), BLOCK_G)
    tiles: tl.tuple = ()
    for j in tl.static_range(TILES):
        PLACE: tl.constexpr = field_place(K.BITS, 2 * j)
        b_s = tl.zeros([ROWS, 2 * BLOCK_G], tl.int32)
        if K.BOOSTED > 0:
            b_w = load_key_bytes(p_codes + T // 4 * D, K.BOOSTED, ROWS, K.BOOSTED)
            b_c = take_bits(b_w, 2 * j, 2, high_place(PLACE))
            b_s = tl.dot(b_c, b_high, b_s, out_dtype=tl.int32) * 2 ** (PLACE + 2 - high_place(PLACE))
        b_s = key_dots(b_s, digits, p_codes, j, K, TILES, T, D)
        tiles += (join8(b_s, ROWS, BLOCK_G) * (b_unit * 2.0**-PLACE)[None, :] + b_bias[None, :],)
    return join_tiles(tiles, TILES, ROWS, BLOCK_G)
