"""Loads of the integer decode functions: tiles of code bytes and metadata, padded to the depth of an integer dot."""

from __future__ import annotations

import triton
import triton.language as tl

from .integer_codes import tile_lanes

DOT_DEPTH = 32  # least elements summed by an integer dot; smaller blocks are padded


@triton.constexpr_function
def block_of(n):
    """Extent of a block that holds ``n`` rows or columns of codes, padded for the integer dot."""
    return max(DOT_DEPTH, triton.next_power_of_2(n))


@triton.jit
def load_top(p_tops, i_h):
    """The largest range of a head, read with its neighbour's: only loads of four bytes are fetched ahead."""
    b_pair = tl.load(p_tops.to(tl.pointer_type(tl.int32), bitcast=True) + i_h // 2)
    return (b_pair >> (i_h % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_part(p_x, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Elements FIRST .. FIRST + COUNT - 1 as float32, padded with zeros."""
    o_x = tl.arange(0, block_of(COUNT))
    if block_of(COUNT) == COUNT:
        b_x = tl.load(p_x + FIRST + o_x)
    else:
        b_x = tl.load(p_x + FIRST + o_x, mask=o_x < COUNT, other=0.0)
    return b_x.to(tl.float32)


@triton.jit
def load_channels(p_meta, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers FIRST .. FIRST + COUNT - 1 of a head's metadata as float32 [BLOCK], padded with zeros.

    They are read with their neighbours: only loads of four bytes are fetched ahead, and few threads have two numbers.
    """
    o_x = tl.arange(0, BLOCK)
    p_words = p_meta.to(tl.pointer_type(tl.int32), bitcast=True) + (FIRST + o_x) // 2
    b_words = tl.load(p_words, mask=o_x < COUNT, other=0) >> (FIRST + o_x) % 2 * 16
    return b_words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_channel_pairs(p_meta, FIRST: tl.constexpr, COUNT: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr):
    """(min, range) of channels FIRST .. FIRST + COUNT - 1 as ``load_channels``, ranges ``CODED`` numbers behind minima.

    One load, since each needs registers for its place in the buffers of pages fetched ahead.
    """
    o_x = tl.arange(0, BLOCK)[:, None]
    o_number = FIRST + o_x + tl.arange(0, 2)[None, :] * CODED
    p_words = p_meta.to(tl.pointer_type(tl.int32), bitcast=True) + o_number // 2
    b_words = tl.load(p_words, mask=o_x < COUNT, other=0) >> o_number % 2 * 16
    b_low, b_range = tl.split(b_words.to(tl.int16).to(tl.float16, bitcast=True))
    return b_low.to(tl.float32), b_range.to(tl.float32)


@triton.jit
def load_query(p_q, FIRST: tl.constexpr, COUNT: tl.constexpr, b_heads, scale):
    """Channels FIRST .. FIRST + COUNT - 1 of the heads' queries times ``scale``, padded with zeros: [n, BLOCK_G]."""
    o_d = tl.arange(0, block_of(COUNT))
    b_mask = (o_d < COUNT)[:, None] & b_heads[None, :]
    p = p_q[None, :] + (FIRST + o_d)[:, None]
    return tl.load(p, mask=b_mask, other=0.0, cache_modifier=".cg").to(tl.float32) * scale


@triton.jit
def load_token_meta(p_meta, G: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr):
    """(min, range) of channel group G, each [ROWS, TILES] float32, from ``[groups][T / 4 lanes][4 tiles][2]``."""
    ROWS: tl.constexpr = T // TILES
    o_row, o_pair = tile_lanes(ROWS), tl.arange(0, 2 * TILES)
    if TILES == 4:
        o_meta = o_row[:, None] * 8 + o_pair[None, :]
    else:
        o_lane = o_row % (T // 4) * 8 + o_row // (T // 4) * 2
        o_meta = o_lane[:, None] + (o_pair // 2 * (8 // TILES) + o_pair % 2)[None, :]
    b_meta = tl.load(p_meta.to(tl.pointer_type(tl.float16), bitcast=True) + G * (2 * T) + o_meta)
    b_low, b_range = tl.split(tl.reshape(b_meta, (ROWS, TILES, 2)))
    return b_low.to(tl.float32), b_range.to(tl.float32)


@triton.jit
def load_key_bytes(p_bytes, STRIDE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows of K bytes in the order of ``tile_lanes`` as [ROWS, channels]."""
    o_d = tl.arange(0, block_of(CHANNELS))
    p_rows = p_bytes + tile_lanes(ROWS)[:, None] * STRIDE + o_d[None, :]
    if block_of(CHANNELS) == CHANNELS:
        b_w = tl.load(p_rows)
    else:
        b_w = tl.load(p_rows, mask=(o_d < CHANNELS)[None, :], other=0)
    return b_w


@triton.jit
def load_value_bytes(p_bytes, LANES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """The first ROWS of LANES columns of V bytes as [BLOCK, ROWS]."""
    o_d = tl.arange(0, BLOCK)
    p_rows = p_bytes + o_d[:, None] * LANES + tl.arange(0, ROWS)[None, :]
    return tl.load(p_rows) if BLOCK == CHANNELS else tl.load(p_rows, mask=(o_d < CHANNELS)[:, None], other=0)
