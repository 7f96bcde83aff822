"""Integer decode functions of V per channel, a group being the page: of uniform sides, and of sides in runs.

A run is consecutive channels of one width; channels behind the last one have a mean and no codes.
o = step (pi . c) + low sum(p), where pi is p alone in fixed point: its digits serve all channels, and (min, range) act
on sums.

Shapes:  b_p [ROWS, BLOCK_G, TILES];  p_codes, p_meta: uint8 pointers to a side's codes and metadata
"""

from __future__ import annotations

import triton
import triton.language as tl

from .integer_codes import fixed_point, split_tiles, split_weights, zero_value
from .integer_loads import DOT_DEPTH, load_channel_pairs, load_channels
from .integer_tiles import count, value_block


@triton.constexpr_function
def num_coded(side):
    """Channels with codes."""
    return sum(run.CHANNELS for run in side.RUNS)


@triton.constexpr_function
def split_channels(first, last):
    """(first channel, channels) of blocks of as many channels as a dot of K sums; larger ones take more registers."""
    return tuple((at, min(DOT_DEPTH, last - at)) for at in range(first, last, DOT_DEPTH))


@triton.constexpr_function
def run_blocks(channels, bits):
    """``split_channels`` of a run, within its halves where they share the bytes of a set of 1 bit."""
    if bits % 2:
        half = channels // 2
        return tuple((first + at, n) for at, n in split_channels(0, half) for first in (0, half))
    return split_channels(0, channels)


@triton.constexpr_function
def run_of(side, i):
    """Run ``i``. Only a function's result keeps its fields in Triton 3.6, where elements of tuples lose them."""
    return side.RUNS[i]


@triton.constexpr_function
def coded_blocks(side):
    """(number of the run, first of its channels, channels, first of the head's channels) of the blocks of all runs."""
    runs = enumerate(side.RUNS)
    return tuple((i, at, n, run.FIRST + at) for i, run in runs for at, n in run_blocks(run.CHANNELS, run.BITS))


@triton.constexpr_function
def rows_of(n):
    """Rows of a block that holds ``n`` channels, padded for the integer dot, whose depth is tokens."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def begin_channels(V: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """Zeroed sums [channels, BLOCK_G] of each block with codes, then of each without."""
    BLOCKS: tl.constexpr = coded_blocks(V)
    MEANS: tl.constexpr = split_channels(num_coded(V), D)
    sums: tl.tuple = ()
    for r in tl.static_range(count(BLOCKS)):
        sums += (tl.zeros([rows_of(BLOCKS[r][2]), BLOCK_G], tl.float32),)
    for r in tl.static_range(count(MEANS)):
        sums += (tl.zeros([rows_of(MEANS[r][1]), BLOCK_G], tl.float32),)
    return sums


@triton.jit
def add_channels(
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
    BLOCKS: tl.constexpr = coded_blocks(V)
    MEANS: tl.constexpr = split_channels(num_coded(V), D)
    CODED: tl.constexpr = num_coded(V)
    p_codes, p_meta = p_codes + i_h * V.CODES, p_meta + i_h * V.META
    b_fix, _ = fixed_point(tl.full([BLOCK_G], 1.0, tl.float32), 1)  # weights are at most 1
    tiles = split_tiles(b_p * b_fix[None, :, None], TILES, T // TILES, BLOCK_G)
    weights: tl.tuple = ()
    for j in tl.static_range(TILES):
        weights += (split_weights(tiles[j], T // TILES, BLOCK_G),)
    b_total = tl.sum(tl.sum(b_p, 2), 0)
    outs: tl.tuple = ()
    for r in tl.static_range(count(BLOCKS)):
        b_o = sums[r] * b_shrink[None, :]
        outs += (add_block(b_o, weights, b_total, p_codes, p_meta, *BLOCKS[r], CODED, V, TILES, T, BLOCK_G),)
    for r in tl.static_range(count(MEANS)):
        b_mean = load_channels(p_meta, CODED + MEANS[r][0], MEANS[r][1], rows_of(MEANS[r][1]))
        outs += (sums[count(BLOCKS) + r] * b_shrink[None, :] + b_mean[:, None] * b_total[None, :],)
    return outs


@triton.jit
def add_block(
    b_o,
    weights,
    b_total,
    p_codes,
    p_meta,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEAD_FIRST: tl.constexpr,
    CODED: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """``b_o`` [channels, BLOCK_G] plus a block of run N's channels times digits of weights, whose sums are given."""
    RUN: tl.constexpr = run_of(V, N)
    b_low, b_range = load_channel_pairs(p_meta, HEAD_FIRST, CHANNELS, CODED, rows_of(CHANNELS))
    b_codes = value_block(
        weights, p_codes + RUN.CODES, FIRST, CHANNELS, rows_of(CHANNELS), RUN, TILES, T, RUN.CHANNELS, BLOCK_G
    )
    _, b_unit = fixed_point(b_range, RUN.BITS, RUN.ETA)
    b_low = zero_value(b_low, b_range, RUN.BITS, RUN.ETA)
    return b_o + b_codes * b_unit[:, None] + b_low[:, None] * b_total[None, :]


@triton.jit
def finish_channels(sums, b_total, p_o, p_bank, i_h, b_heads, V: tl.constexpr, D: tl.constexpr):
    """Stores the sums over ``b_total`` [BLOCK_G] as rows of D float32 at ``p_o`` [BLOCK_G]."""
    BLOCKS: tl.constexpr = coded_blocks(V)
    MEANS: tl.constexpr = split_channels(num_coded(V), D)
    for r in tl.static_range(count(BLOCKS)):
        store_channels(sums[r], b_total, p_o, b_heads, BLOCKS[r][3], BLOCKS[r][2])
    for r in tl.static_range(count(MEANS)):
        store_channels(sums[count(BLOCKS) + r], b_total, p_o, b_heads, MEANS[r][0], MEANS[r][1])


@triton.jit
def store_channels(b_o, b_total, p_o, b_heads, FIRST: tl.constexpr, CHANNELS: tl.constexpr):
    """Stores the sums of a block over ``b_total``."""
    o_d = tl.arange(0, rows_of(CHANNELS))
    m_o = (o_d < CHANNELS)[:, None] & b_heads[None, :]
    tl.store(p_o[None, :] + (FIRST + o_d)[:, None], b_o / b_total[None, :], mask=m_o)
