"""Device functions that store codes as plane sets and load codes by element, in the layout of ``codes``.

Tiles are [T, TILE_D] with channels d >= D as padding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_codes(
    p_codes, b_codes, BITS: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Packs channels ``FIRST`` to ``FIRST + D - 1`` of b_codes [T, TILE_D] int32 and writes them at p_codes (uint8)."""
    if BITS == 3:
        _store_set(p_codes, b_codes & 3, 2, IS_K, T, D, TILE_D, FIRST)
        _store_set(p_codes + T // 4 * D, b_codes >> 2, 1, IS_K, T, D, TILE_D, FIRST)
    else:
        _store_set(p_codes, b_codes, BITS, IS_K, T, D, TILE_D, FIRST)


@triton.jit
def _store_set(
    p_codes, b_codes, WIDTH: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = T // 4 if WIDTH == 1 else T * WIDTH // 8
    COLUMNS: tl.constexpr = D // 2 if WIDTH == 1 else D
    b_bytes = join_planes(b_codes, WIDTH, LANES, TILE_D)
    if WIDTH == 1:
        b_bytes = _fold_halves(b_bytes, LANES, COLUMNS, TILE_D)
    b_bytes = b_bytes.to(tl.uint8)
    o_lane = tl.arange(0, LANES)
    o_d = tl.arange(0, b_bytes.shape[1]) - FIRST
    m_d = (o_d >= 0) & (o_d < COLUMNS)
    if IS_K:
        tl.store(p_codes + o_lane[:, None] * COLUMNS + o_d[None, :], b_bytes, mask=m_d[None, :])
    else:
        tl.store(p_codes + o_d[:, None] * LANES + o_lane[None, :], tl.trans(b_bytes), mask=m_d[:, None])


@triton.jit
def join_planes(b_codes, WIDTH: tl.constexpr, LANES: tl.constexpr, TILE_D: tl.constexpr):
    """Codes [T, TILE_D] of consecutive runs of tokens side by side, WIDTH bits each: [LANES, TILE_D]."""
    PLANES: tl.constexpr = b_codes.shape[0] // LANES
    shift = tl.arange(0, PLANES) * WIDTH
    return tl.sum(tl.reshape(b_codes, (PLANES, LANES, TILE_D)) << shift[:, None, None], 0)


@triton.jit
def _fold_halves(b_nibbles, LANES: tl.constexpr, COLUMNS: tl.constexpr, TILE_D: tl.constexpr):
    """The second half of the channels goes into the high nibbles of the first."""
    if 2 * COLUMNS == TILE_D:
        shift = tl.arange(0, 2) * 4
        b_bytes = tl.sum(tl.reshape(b_nibbles, (LANES, 2, COLUMNS)) << shift[None, :, None], 1)
    else:
        o_other = tl.minimum(tl.arange(0, TILE_D) + COLUMNS, TILE_D - 1)
        b_bytes = b_nibbles | tl.gather(b_nibbles, tl.broadcast_to(o_other[None, :], (LANES, TILE_D)), 1) << 4
    return b_bytes


@triton.jit
def load_codes(p_codes, o_t, o_d, m_x, BITS: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """Codes of tokens ``o_t`` and channels ``o_d`` as [TILE, BLOCK_D] int32. Each byte is read once a plane."""
    if BITS == 3:
        b_codes = _load_set(p_codes, o_t, o_d, m_x, 2, IS_K, T, D)
        b_codes += _load_set(p_codes + T // 4 * D, o_t, o_d, m_x, 1, IS_K, T, D) << 2
    else:
        b_codes = _load_set(p_codes, o_t, o_d, m_x, BITS, IS_K, T, D)
    return b_codes


@triton.jit
def _load_set(p_codes, o_t, o_d, m_x, WIDTH: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    LANES: tl.constexpr = T // 4 if WIDTH == 1 else T * WIDTH // 8
    COLUMNS: tl.constexpr = D // 2 if WIDTH == 1 else D
    shift = (o_t // LANES * WIDTH)[:, None] + (o_d // COLUMNS * 4)[None, :]
    o_lane, o_column = (o_t % LANES)[:, None], (o_d % COLUMNS)[None, :]
    o_byte = o_lane * COLUMNS + o_column if IS_K else o_column * LANES + o_lane
    return tl.load(p_codes + o_byte, mask=m_x, other=0).to(tl.int32) >> shift & (1 << WIDTH) - 1


@triton.jit
def shrink_codes(b_codes, FROM_BITS: tl.constexpr, TO_BITS: tl.constexpr):
    """Codes after the equivalent right shifts FROM_BITS -> TO_BITS, by one exact division that equals their chain.

    The chain of shifts itself is avoided: Triton 3.6 gives wrong 1-bit codes for it from 4 bits on sm_90.
    """
    RATIO: tl.constexpr = (2**FROM_BITS - 1) // (2**TO_BITS - 1)
    return (b_codes + RATIO // 2) // RATIO
