"""Codes of token tiles for integer dots: bytes of plane sets, each loaded where it is used, as int8."""

from __future__ import annotations

import triton
import triton.language as tl

from .integer_codes import join8, take_bits, take_joined
from .integer_loads import load_key_bytes, load_value_bytes


@triton.constexpr_function
def set_lanes(width, t):
    """Token lanes of a plane set; 1-bit sets have two channels in a byte instead of fewer lanes."""
    return max(2, width) * t // 8


@triton.constexpr_function
def tile_shift(bits, j, rows, t):
    """The first bit of token tile ``j`` of ``rows`` tokens in the bytes of its plane set; of 3 bits, in the low set."""
    width = 2 if bits == 3 else bits
    return j // (set_lanes(width, t) // rows) * width


@triton.constexpr_function
def count(items):
    """Length of a tuple."""
    return len(items)


@triton.constexpr_function
def field_place(bits, shift):
    """The bit at which K's codes of a tile stay, at 3 bits the one with the least shifts; codes must fit an int8."""
    if bits == 3:
        return (0, 2, 4, 1)[shift // 2]
    return shift if bits == 2 and shift < 6 else 0


@triton.jit
def key_codes(
    p_codes,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Codes [ROWS, channels] of token tile J of a part of K's channels, at their ``field_place``."""
    ROWS: tl.constexpr = T // TILES
    WIDTH: tl.constexpr = 2 if K.BITS == 3 else K.BITS  # of the plane set
    SETS: tl.constexpr = set_lanes(WIDTH, T) // ROWS  # tiles side by side in the lanes
    SHIFT: tl.constexpr = tile_shift(K.BITS, J, ROWS, T)
    TO: tl.constexpr = field_place(K.BITS, SHIFT)
    HIGH: tl.constexpr = T // 4 * D if K.BITS == 3 else 0
    BIT: tl.constexpr = FIRST // (D // 2) * 4 + J  # in a 1-bit set
    if K.BITS > 1:
        b_w = load_key_bytes(p_codes + J % SETS * ROWS * D + FIRST, D, ROWS, CHANNELS)
    if K.BITS % 2:
        b_high = load_key_bytes(p_codes + HIGH + FIRST % (D // 2), D // 2, ROWS, CHANNELS)
    if K.BITS == 1:
        b_c = take_bits(b_high, BIT, 1, TO)
    else:
        b_c = take_joined(b_w, b_high, SHIFT, BIT, TO) if K.BITS == 3 else take_bits(b_w, SHIFT, WIDTH, TO)
    return b_c


@triton.jit
def value_codes(
    p_codes,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    J: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """Codes [BLOCK, ROWS] of token tile J of a block of V's rows."""
    ROWS: tl.constexpr = T // TILES
    WIDTH: tl.constexpr = 2 if V.BITS == 3 else V.BITS
    LANES: tl.constexpr = set_lanes(WIDTH, T)
    SETS: tl.constexpr = LANES // ROWS
    HIGH: tl.constexpr = T // 4 * D if V.BITS == 3 else 0
    BIT: tl.constexpr = FIRST // (D // 2) * 4 + J  # in a 1-bit set
    if V.BITS % 2:
        b_high = load_value_bytes(p_codes + HIGH + FIRST % (D // 2) * (T // 4), T // 4, ROWS, CHANNELS, BLOCK)
    if V.BITS == 1:
        b_c = take_bits(b_high, BIT, 1, 0)
    else:
        b_w = load_value_bytes(p_codes + FIRST * LANES + J % SETS * ROWS, LANES, ROWS, CHANNELS, BLOCK)
        b_c = take_joined(b_w, b_high, J * 2, BIT, 0) if V.BITS == 3 else take_bits(b_w, J // SETS * WIDTH, WIDTH, 0)
    return b_c


@triton.jit
def value_block(
    weights,
    p_codes,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Codes of a block of V's rows times weights, [BLOCK, BLOCK_G] in fixed-point units."""
    b_o = tl.zeros([BLOCK, 2 * BLOCK_G], tl.int32)
    for j in tl.static_range(TILES):
        b_o = tl.dot(
            value_codes(p_codes, FIRST, CHANNELS, BLOCK, j, V, TILES, T, D), weights[j], b_o, out_dtype=tl.int32
        )
    return join8(b_o, BLOCK, BLOCK_G)
