"""Integer decode functions of Kitty sides: dots on the 2-bit set of all channels and on that of boosted ones.

q . (low + c step) = unit (qi . base + 4 qi . high) + bias, as for uniform sides, where qi is q * range in fixed point,
over 5 in boosted channels. One int32 sum serves both sets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..family import KeyFunctions
from ..uniform.integer import channel_parts, channel_query, key_dots
from ..uniform.integer_codes import digits, fixed, fixed_point, join8, join_tiles, split_rows, take_bits
from ..uniform.integer_loads import DOT_DEPTH, block_of, load_key_bytes, load_part, load_top
from ..uniform.integer_tiles import count, field_place
from ..uniform.layout import TILES as MAX_TILES
from .layout import KittySide


def integer_functions(side: KittySide) -> KeyFunctions | None:
    """The device functions of a side, or ``None`` for pages of another size than 128 tokens."""
    if side.shape.num_tokens != MAX_TILES * DOT_DEPTH:
        return None
    return KeyFunctions(channel_query, boosted_scores, MAX_TILES)


@triton.constexpr_function
def high_place(place):
    """The bit at which high codes stay beside low ones at ``place``; together they must fit an int8."""
    return min(place + 2, 4)


@triton.jit
def load_numbers(p_numbers, BOOSTED: tl.constexpr):
    """Numbers of boosted channels, padded with zeros; read four at a time, as only words are fetched ahead."""
    o_slot = tl.arange(0, block_of(BOOSTED))
    p_words = p_numbers.to(tl.pointer_type(tl.int32), bitcast=True) + o_slot // 4
    return tl.load(p_words, mask=o_slot < BOOSTED, other=0) >> o_slot % 4 * 8 & 255


@triton.jit
def scaled_query(query, b_fix, p_meta, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """(q * range of each channel part, over 5 in boosted channels, ``fixed``; bias [BLOCK_G])."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    p_lows = p_meta.to(tl.pointer_type(tl.float16), bitcast=True)
    scaled: tl.tuple = ()
    b_bias = tl.zeros([BLOCK_G], tl.float32)
    for i in tl.static_range(count(PARTS)):
        b_low = load_part(p_lows, i * (D // 2), PARTS[i])
        b_range = load_part(p_lows + D, i * (D // 2), PARTS[i])
        b_step = tl.maximum(b_range, b_range * -0.2)  # ranges of boosted channels are negative
        b_bias += tl.sum(query[i] * b_low[:, None], 0)
        scaled += (fixed(query[i] * b_fix[None, :] * b_step[:, None]),)
    return scaled, b_bias


@triton.jit
def gather_query(scaled, b_channel, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """The rows of ``scaled`` of channels ``b_channel`` [n]: [n, BLOCK_G] int32.

    Channels half a head apart share a word, and even and odd rows are gathered apart: a shuffle brings one row of each
    thread, so 32 rows of words are fetched without waste.
    """
    if count(scaled) == 2:
        b_words = (scaled[0] & 0xFFFF) | (scaled[1] << 16)
        b_row, b_shift = b_channel % (D // 2), b_channel // (D // 2) * 16
    else:
        b_words, b_row, b_shift = scaled[0], b_channel, tl.zeros_like(b_channel)
    b_even, b_odd = tl.split(tl.permute(tl.reshape(b_words, (b_words.shape[0] // 2, 2, BLOCK_G)), (0, 2, 1)))
    o_row = tl.broadcast_to((b_row // 2)[:, None], (b_channel.shape[0], BLOCK_G))
    b_x = tl.where((b_row % 2)[:, None] == 0, tl.gather(b_even, o_row, 0), tl.gather(b_odd, o_row, 0))
    return b_x >> b_shift[:, None]


@triton.jit
def boosted_tile(
    base,
    b_high,
    b_unit,
    p_codes,
    J: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Codes of token tile J times q in ``b_unit`` [BLOCK_G], [ROWS, BLOCK_G]; ``b_high``: boosted channels' digits."""
    ROWS: tl.constexpr = T // TILES
    PLACE: tl.constexpr = field_place(K.BITS, 2 * J)
    HIGH: tl.constexpr = high_place(PLACE)
    b_s = tl.zeros([ROWS, 2 * BLOCK_G], tl.int32)
    if K.BOOSTED > 0:
        b_c = take_bits(load_key_bytes(p_codes + T // 4 * D, K.BOOSTED, ROWS, K.BOOSTED), 2 * J, 2, HIGH)
        b_s = tl.dot(b_c, b_high, b_s, out_dtype=tl.int32) * 2 ** (PLACE + 2 - HIGH)
    b_s = key_dots(b_s, base, p_codes, J, K, TILES, T, D)
    return join8(b_s, ROWS, BLOCK_G) * (b_unit * 2.0**-PLACE)[None, :]


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
    b_fix, b_unit = fixed_point(query[N] * load_top(p_meta + K.TOP, i_h), K.BITS)
    p_codes, p_meta = p_codes + i_h * K.CODES, p_meta + i_h * K.META
    scaled, b_bias = scaled_query(query, b_fix, p_meta, K, D, BLOCK_G)
    base: tl.tuple = ()
    for i in tl.static_range(N):
        base += (split_rows(scaled[i], block_of(PARTS[i]), BLOCK_G),)
    b_high = base[0]
    if K.BOOSTED > 0:
        b_channel = load_numbers(p_meta + K.NUMBERS, K.BOOSTED)
        b_i = gather_query(scaled, b_channel, D, BLOCK_G)
        b_high = tl.reshape(tl.join(*digits(b_i)), (block_of(K.BOOSTED), 2 * BLOCK_G))
    tiles: tl.tuple = ()
    for j in tl.static_range(TILES):
        b_s = boosted_tile(base, b_high, b_unit, p_codes, j, K, TILES, T, D, BLOCK_G)
        tiles += (b_s + b_bias[None, :],)
    return join_tiles(tiles, TILES, T // TILES, BLOCK_G)
