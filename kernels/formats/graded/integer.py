"""Integer decode functions of graded sides of K: dots on the codes of each run. Those of V are the uniform family's.

q . (low + c step) = sum over runs of unit (qi . c) + bias, as for uniform sides, where qi is q * range in the same
fixed point for all runs. Means of channels without codes are part of the bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..family import KeyFunctions, ValueFunctions
from ..uniform.integer_channels import (
    add_channels,
    begin_channels,
    coded_blocks,
    finish_channels,
    run_blocks,
    run_of,
    split_channels,
)
from ..uniform.integer_codes import fixed, fixed_point, join8, join_tiles, split_rows, zero_value
from ..uniform.integer_loads import DOT_DEPTH, load_channel_pairs, load_channels, load_query, load_top
from ..uniform.integer_tiles import count, field_place, key_codes, tile_shift
from ..uniform.layout import TILES as MAX_TILES
from .layout import GradedSide

DEPTH = tl.constexpr(DOT_DEPTH)


def integer_functions(side: GradedSide) -> KeyFunctions | ValueFunctions | None:
    """The device functions of a side, or ``None`` for pages of another size than 128 tokens."""
    if side.shape.num_tokens != MAX_TILES * DOT_DEPTH:
        return None
    narrowest = side.runs[-1].bits
    min_tiles = MAX_TILES if narrowest < 4 else 8 // narrowest
    if side.name == "v":
        return ValueFunctions(begin_channels, add_channels, finish_channels, min_tiles)
    return KeyFunctions(graded_query, graded_scores, min_tiles)


@triton.constexpr_function
def blocks_before(side, i):
    """Blocks of the runs before run ``i``."""
    return sum(len(run_blocks(run.CHANNELS, run.BITS)) for run in side.RUNS[:i])


@triton.jit
def graded_query(p_q, p_bank, i_h, b_heads, scale, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """(q of each block with codes, then of each without [channels, BLOCK_G]; largest magnitude [BLOCK_G])."""
    BLOCKS: tl.constexpr = coded_blocks(K)
    MEANS: tl.constexpr = split_channels(K.CODED, D)
    query: tl.tuple = ()
    b_top = tl.zeros([BLOCK_G], tl.float32)
    for r in tl.static_range(count(BLOCKS)):
        b_q = load_query(p_q, BLOCKS[r][3], BLOCKS[r][2], b_heads, scale)
        b_top = tl.maximum(b_top, tl.max(tl.abs(b_q), 0))
        query += (b_q,)
    for r in tl.static_range(count(MEANS)):
        query += (load_query(p_q, MEANS[r][0], MEANS[r][1], b_heads, scale),)
    query += (b_top,)
    return query


@triton.jit
def scaled_query(query, b_fix, p_meta, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """(digits of q * range of each block with codes; bias [BLOCK_G])."""
    BLOCKS: tl.constexpr = coded_blocks(K)
    MEANS: tl.constexpr = split_channels(K.CODED, D)
    digits: tl.tuple = ()
    b_bias = tl.zeros([DEPTH, BLOCK_G], tl.float32)
    for r in tl.static_range(count(BLOCKS)):
        b_low, b_range = load_channel_pairs(p_meta, BLOCKS[r][3], BLOCKS[r][2], K.CODED, DEPTH)
        b_bias += query[r] * run_zero(b_low, b_range, run_of(K, BLOCKS[r][0]))[:, None]
        b_scaled = fixed(query[r] * b_fix[None, :] * b_range[:, None])
        digits += (split_rows(b_scaled, DEPTH, BLOCK_G),)
    for r in tl.static_range(count(MEANS)):
        b_mean = load_channels(p_meta, K.CODED + MEANS[r][0], MEANS[r][1], DEPTH)
        b_bias += query[count(BLOCKS) + r] * b_mean[:, None]
    return digits, tl.sum(b_bias, 0)


@triton.jit
def run_zero(b_low, b_range, RUN: tl.constexpr):
    """``zero_value`` of a run's channels."""
    return zero_value(b_low, b_range, RUN.BITS, RUN.ETA)


@triton.jit
def run_tile(
    digits,
    b_bound,
    p_codes,
    N: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Codes of token tile J and run N times q: [ROWS, BLOCK_G]; ``b_bound`` [BLOCK_G]: of q * range, all ``digits``."""
    ROWS: tl.constexpr = T // TILES
    RUN: tl.constexpr = run_of(K, N)
    BLOCKS: tl.constexpr = run_blocks(RUN.CHANNELS, RUN.BITS)
    TO: tl.constexpr = field_place(RUN.BITS, tile_shift(RUN.BITS, J, ROWS, T))
    b_s = tl.zeros([ROWS, 2 * BLOCK_G], tl.int32)
    for r in tl.static_range(count(BLOCKS)):
        b_c = key_codes(p_codes + RUN.CODES, BLOCKS[r][0], BLOCKS[r][1], J, RUN, TILES, T, RUN.CHANNELS)
        b_s = tl.dot(b_c, digits[blocks_before(K, N) + r], b_s, out_dtype=tl.int32)
    _, b_unit = fixed_point(b_bound, RUN.BITS, RUN.ETA)
    return join8(b_s, ROWS, BLOCK_G) * (b_unit * 2.0**-TO)[None, :]


@triton.jit
def graded_scores(
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
    b_bound = query[count(query) - 1] * load_top(p_meta + K.TOP, i_h)
    b_fix, _ = fixed_point(b_bound, 1)
    p_codes, p_meta = p_codes + i_h * K.CODES, p_meta + i_h * K.META
    digits, b_bias = scaled_query(query, b_fix, p_meta, K, D, BLOCK_G)
    tiles: tl.tuple = ()
    for j in tl.static_range(TILES):
        b_s = tl.zeros([T // TILES, BLOCK_G], tl.float32) + b_bias[None, :]
        for i in tl.static_range(count(K.RUNS)):
            b_s += run_tile(digits, b_bound, p_codes, i, j, K, TILES, T, BLOCK_G)
        tiles += (b_s,)
    return join_tiles(tiles, TILES, T // TILES, BLOCK_G)
