"""Codes in registers to and from byte planes in memory: device functions shared by the Triton kernels.

The layout is that of ``kernels.bits``; tiles are [T, TILE_D] with channels d >= D as padding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_codes(p_codes, b_codes, BITS: tl.constexpr, IS_K: tl.constexpr, D: tl.constexpr):
    """Packs b_codes [T, TILE_D] int32 and writes it at p_codes (uint8)."""
    if BITS == 3:
        _store_planes(p_codes, b_codes & 3, 2, IS_K, D)
        _store_planes(p_codes + b_codes.shape[0] // 4 * D, b_codes >> 2, 1, IS_K, D)
    else:
        _store_planes(p_codes, b_codes, BITS, IS_K, D)


@triton.jit
def _store_planes(p_codes, b_codes, WIDTH: tl.constexpr, IS_K: tl.constexpr, D: tl.constexpr):
    PLANES: tl.constexpr = 8 // WIDTH
    LANES: tl.constexpr = b_codes.shape[0] // PLANES
    TILE_D: tl.constexpr = b_codes.shape[1]
    shift = tl.arange(0, PLANES) * WIDTH
    b_bytes = tl.sum(tl.reshape(b_codes, (PLANES, LANES, TILE_D)) << shift[:, None, None], 0).to(tl.uint8)
    o_lane = tl.arange(0, LANES)
    o_d = tl.arange(0, TILE_D)
    if IS_K:
        tl.store(p_codes + o_lane[:, None] * D + o_d[None, :], b_bytes, mask=o_d[None, :] < D)
    else:
        tl.store(p_codes + o_d[:, None] * LANES + o_lane[None, :], tl.trans(b_bytes), mask=o_d[:, None] < D)


@triton.jit
def load_codes(p_codes, BITS: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """The codes at p_codes (uint8) as [T, TILE_D] int32, 0 in the padding."""
    if BITS == 3:
        b_low = _load_planes(p_codes, 2, IS_K, T, D, TILE_D)
        b_codes = b_low | _load_planes(p_codes + T // 4 * D, 1, IS_K, T, D, TILE_D) << 2
    else:
        b_codes = _load_planes(p_codes, BITS, IS_K, T, D, TILE_D)
    return b_codes


@triton.jit
def _load_planes(
    p_codes, WIDTH: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr
):
    PLANES: tl.constexpr = 8 // WIDTH
    LANES: tl.constexpr = T // PLANES
    o_lane = tl.arange(0, LANES)
    o_d = tl.arange(0, TILE_D)
    if IS_K:
        b_bytes = tl.load(p_codes + o_lane[:, None] * D + o_d[None, :], mask=o_d[None, :] < D, other=0)
    else:
        b_bytes = tl.load(p_codes + o_d[:, None] * LANES + o_lane[None, :], mask=o_d[:, None] < D, other=0)
        b_bytes = tl.trans(b_bytes)
    shift = tl.arange(0, PLANES) * WIDTH
    b_codes = (b_bytes.to(tl.int32)[None, :, :] >> shift[:, None, None]) & (1 << WIDTH) - 1
    return tl.reshape(b_codes, (T, TILE_D))


@triton.jit
def shrink_codes(b_codes, FROM_BITS: tl.constexpr, TO_BITS: tl.constexpr):
    """The equivalent right shifts FROM_BITS -> TO_BITS as one exact division, which they equal for every code.

    The chain of shifts itself is avoided: Triton 3.6 gives wrong 1-bit codes for it from 4 bits on sm_90.
    """
    RATIO: tl.constexpr = (2**FROM_BITS - 1) // (2**TO_BITS - 1)
    return (b_codes + RATIO // 2) // RATIO
