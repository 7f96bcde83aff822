"""Integer decode functions of uniform sides: a page's scores by dots on bare K codes, its output by dots on V codes.

K: q . (low + c step) = unit (qi . c) + bias, where qi is q * range in fixed point. V alike, with weights p * range.
A page has TILES tiles of consecutive tokens, ROWS = T / TILES; rows of a score tile are in the order of ``tile_lanes``.
Bytes are loaded where they are used: the compiler merges loads of equal addresses.

Shapes:  b_p, scores [ROWS, BLOCK_G, TILES];  p_codes, p_meta: uint8 pointers to a side's codes and metadata
Units:   scores in log2
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..family import KeyFunctions, ValueFunctions
from .integer_channels import add_channels, begin_channels, finish_channels
from .integer_codes import (
    fixed,
    fixed_point,
    join8,
    join_tiles,
    split_rows,
    split_tiles,
    split_weights,
    zero_value,
)
from .integer_loads import DOT_DEPTH, block_of, load_part, load_query, load_token_meta, load_top
from .integer_tiles import count, field_place, key_codes, tile_shift, value_block
from .layout import TILES as MAX_TILES
from .layout import UniformSide


def integer_functions(side: UniformSide) -> KeyFunctions | ValueFunctions | None:
    """The device functions of a side, or ``None`` where integer dots do not apply.

    All products in one integer dot need the same step once ranges are folded into q or p: K's groups must be tokens of
    a channel or a token's whole head, V's groups channels of a token or the page's tokens of a channel. Pages have 128
    tokens.
    """
    tokens = side.shape.num_tokens
    if tokens != MAX_TILES * DOT_DEPTH:
        return None
    min_tiles = MAX_TILES if side.bits < 4 else 8 // side.bits
    if side.name == "v":
        if side.axis == "token":
            return ValueFunctions(begin_values, add_values, finish_values, min_tiles)
        functions = ValueFunctions(begin_channels, add_channels, finish_channels, min_tiles)
        return functions if side.num_groups == 1 else None
    if side.axis == "channel":
        return KeyFunctions(channel_query, channel_scores, max(min_tiles, tokens // side.group))
    return KeyFunctions(token_query, token_scores, min_tiles) if side.num_groups == 1 else None


@triton.constexpr_function
def channel_parts(bits, d):
    """Channels of each part in which K is multiplied: codes of few bits go by halves, which take fewer registers.

    A byte of a 1-bit set has two channels, one of each half.
    """
    return (d // 2, d // 2) if bits < 4 and d % 2 == 0 else (d,)


@triton.constexpr_function
def row_blocks(side, d):
    """(group, first channel, channels) of blocks of V's rows: within a group and a half, as ``channel_parts``."""
    starts = sorted({*range(0, d, side.GROUP), *((d // 2,) if side.BITS % 2 else ())})
    return tuple((a // side.GROUP, a, b - a) for a, b in zip(starts, (*starts[1:], d), strict=True))


@triton.jit
def key_dots(
    b_s,
    digits,
    p_codes,
    J: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """``b_s`` [ROWS, 2 BLOCK_G] plus codes of token tile J, at their ``field_place``, times q's digits."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    for i in tl.static_range(count(PARTS)):
        b_c = key_codes(p_codes, i * (D // 2), PARTS[i], J, K, TILES, T, D)
        b_s = tl.dot(b_c, digits[i], b_s, out_dtype=tl.int32)
    return b_s


@triton.jit
def key_tile(
    digits,
    b_unit,
    p_codes,
    J: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Codes of token tile J times q in ``b_unit`` [BLOCK_G]: [ROWS, BLOCK_G]; ``digits``: q's, of each channel part."""
    ROWS: tl.constexpr = T // TILES
    TO: tl.constexpr = field_place(K.BITS, tile_shift(K.BITS, J, ROWS, T))
    b_s = key_dots(tl.zeros([ROWS, 2 * BLOCK_G], tl.int32), digits, p_codes, J, K, TILES, T, D)
    return join8(b_s, ROWS, BLOCK_G) * (b_unit * 2.0**-TO)[None, :]


@triton.jit
def channel_query(p_q, p_bank, i_h, b_heads, scale, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """K per channel: (q of each channel part as [channels, BLOCK_G], largest magnitude [BLOCK_G])."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    query: tl.tuple = ()
    b_top = tl.zeros([BLOCK_G], tl.float32)
    for i in tl.static_range(count(PARTS)):
        b_q = load_query(p_q, i * (D // 2), PARTS[i], b_heads, scale)
        b_top = tl.maximum(b_top, tl.max(tl.abs(b_q), 0))
        query += (b_q,)
    query += (b_top,)
    return query


@triton.jit
def token_query(p_q, p_bank, i_h, b_heads, scale, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """K per token: (digits of q of each channel part, unit of a score and sum of q [BLOCK_G])."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    raw = channel_query(p_q, p_bank, i_h, b_heads, scale, K, D, BLOCK_G)
    b_fix, b_unit = fixed_point(raw[count(PARTS)], K.BITS, K.ETA)
    query: tl.tuple = ()
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    for i in tl.static_range(count(PARTS)):
        query += (split_rows(fixed(raw[i] * b_fix[None, :]), block_of(PARTS[i]), BLOCK_G),)
        b_sum += tl.sum(raw[i], 0)
    query += (b_unit, b_sum)
    return query


@triton.jit
def group_query(query, b_fix, p_meta, GROUP: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """For a group of tokens of K per channel: (digits of q * range of each channel part, bias [BLOCK_G])."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    p_lows = p_meta.to(tl.pointer_type(tl.float16), bitcast=True) + GROUP * D
    scaled: tl.tuple = ()
    b_bias = tl.zeros([BLOCK_G], tl.float32)
    for i in tl.static_range(count(PARTS)):
        b_low = load_part(p_lows, i * (D // 2), PARTS[i])
        b_range = load_part(p_lows + K.GROUPS * D, i * (D // 2), PARTS[i])
        b_bias += tl.sum(query[i] * zero_value(b_low, b_range, K.BITS, K.ETA)[:, None], 0)
        b_scaled = fixed(query[i] * b_fix[None, :] * b_range[:, None])
        scaled += (split_rows(b_scaled, block_of(PARTS[i]), BLOCK_G),)
    return scaled, b_bias


@triton.jit
def channel_scores(
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
    """Scores of a page whose K is per channel, in groups of whole tiles."""
    ROWS: tl.constexpr = T // TILES
    b_top = query[count(channel_parts(K.BITS, D))]
    b_fix, b_unit = fixed_point(b_top * load_top(p_meta + K.TOP, i_h), K.BITS, K.ETA)
    tiles: tl.tuple = ()
    for j in tl.static_range(TILES):
        if j * ROWS % K.GROUP == 0:
            scaled, b_bias = group_query(query, b_fix, p_meta + i_h * K.META, j * ROWS // K.GROUP, K, D, BLOCK_G)
        b_s = key_tile(scaled, b_unit, p_codes + i_h * K.CODES, j, K, TILES, T, D, BLOCK_G)
        tiles += (b_s + b_bias[None, :],)
    return join_tiles(tiles, TILES, ROWS, BLOCK_G)


@triton.jit
def token_scores(
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
    """Scores of a page whose K is per token, a token's channels one group."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    b_unit, b_sum = query[count(PARTS)], query[count(PARTS) + 1]
    b_low, b_range = load_token_meta(p_meta + i_h * K.META, 0, TILES, T)
    tiles: tl.tuple = ()
    for j in tl.static_range(TILES):
        tiles += (key_tile(query, b_unit, p_codes + i_h * K.CODES, j, K, TILES, T, D, BLOCK_G),)
    b_s = join_tiles(tiles, TILES, T // TILES, BLOCK_G)
    b_low = zero_value(b_low, b_range, K.BITS, K.ETA)
    return b_s * b_range[:, None, :] + b_low[:, None, :] * b_sum[None, :, None]


@triton.jit
def group_weights(
    b_p,
    b_fix,
    p_meta,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """For a group of V's channels: (p . min [ROWS, BLOCK_G], digits of p * range of each token tile)."""
    b_low, b_range = load_token_meta(p_meta, GROUP, TILES, T)
    b_mean = tl.sum(b_p * zero_value(b_low, b_range, V.BITS, V.ETA)[:, None, :], 2)
    tiles = split_tiles(b_p * (b_range * b_fix)[:, None, :], TILES, T // TILES, BLOCK_G)
    weights: tl.tuple = ()
    for j in tl.static_range(TILES):
        weights += (split_weights(tiles[j], T // TILES, BLOCK_G),)
    return b_mean, weights


@triton.jit
def begin_values(V: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """Zeroed sums: p . codes of each block of rows [channels, BLOCK_G], p . min of each group [ROWS, BLOCK_G]."""
    BLOCKS: tl.constexpr = row_blocks(V, D)
    sums: tl.tuple = ()
    for r in tl.static_range(count(BLOCKS)):
        sums += (tl.zeros([block_of(BLOCKS[r][2]), BLOCK_G], tl.float32),)
    GROUPS: tl.constexpr = V.GROUPS
    for _ in tl.static_range(GROUPS):
        sums += (tl.zeros([T // TILES, BLOCK_G], tl.float32),)
    return sums


@triton.jit
def add_values(
    sums,
    b_p,
    b_shrink,
    p_codes,
    p_meta,
    i_h,
    V: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The sums times ``b_shrink``, plus a page weighed by ``b_p``."""
    BLOCKS: tl.constexpr = row_blocks(V, D)
    b_fix, b_unit = fixed_point(load_top(p_meta + V.TOP, i_h), V.BITS, V.ETA)
    p_codes, p_meta = p_codes + i_h * V.CODES, p_meta + i_h * V.META
    outs: tl.tuple = ()
    lows: tl.tuple = ()
    for r in tl.static_range(count(BLOCKS)):
        if r == 0 or BLOCKS[r][0] != BLOCKS[r - 1][0]:  # a group's weights serve all its rows
            b_mean, weights = group_weights(b_p, b_fix, p_meta, BLOCKS[r][0], V, TILES, T, BLOCK_G)
            lows += (sums[count(BLOCKS) + BLOCKS[r][0]] * b_shrink[None, :] + b_mean,)
        b_o = value_block(weights, p_codes, BLOCKS[r][1], BLOCKS[r][2], block_of(BLOCKS[r][2]), V, TILES, T, D, BLOCK_G)
        outs += (sums[r] * b_shrink[None, :] + b_o * b_unit,)
    return outs + lows


@triton.jit
def finish_values(sums, b_total, p_o, p_bank, i_h, b_heads, V: tl.constexpr, D: tl.constexpr):
    """Stores the sums over ``b_total`` [BLOCK_G] as rows of D float32 at ``p_o`` [BLOCK_G]."""
    BLOCKS: tl.constexpr = row_blocks(V, D)
    for r in tl.static_range(count(BLOCKS)):
        o_d = tl.arange(0, block_of(BLOCKS[r][2]))
        b_o = (sums[r] + tl.sum(sums[count(BLOCKS) + BLOCKS[r][0]], 0)[None, :]) / b_total[None, :]
        b_mask = (o_d < BLOCKS[r][2])[:, None] & b_heads[None, :]
        tl.store(p_o[None, :] + (BLOCKS[r][1] + o_d)[:, None], b_o, mask=b_mask)
