"""Peaks, sums of weights and the draw: device code, to be launched without fused multiply-add."""

from __future__ import annotations

import triton
import triton.language as tl

from .reference import ALL_MASKED, EXP2, LOG2_ONE, NOT_FINITE, OK, ROUNDER

_ONE = 2.0**LOG2_ONE
C0, C1, C2 = tl.constexpr(EXP2[0] * _ONE), tl.constexpr(EXP2[1] * _ONE), tl.constexpr(EXP2[2] * _ONE)
C3, C4, C5 = tl.constexpr(EXP2[3] * _ONE), tl.constexpr(EXP2[4] * _ONE), tl.constexpr(EXP2[5] * _ONE)
MAGIC = tl.constexpr(ROUNDER)
FAULT_OK, FAULT_NOT_FINITE, FAULT_ALL_MASKED = tl.constexpr(OK), tl.constexpr(NOT_FINITE), tl.constexpr(ALL_MASKED)
SETTINGS = tl.constexpr(5)  # int64 values a row
VARYING = ["NUM_TILES", "BLOCKS", "SHARES"]  # change from step to step and must not be compiled in


@triton.jit(do_not_specialize=VARYING)
def peak_kernel(
    logits_ptr, peaks_ptr, ids_ptr, tile_peaks_ptr, stride, V, NUM_TILES, BLOCKS,
    BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, HAS_TILE_PEAKS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each share of a row, +inf if it has a NaN, with the lowest id that holds it.

    Shapes:  logits [M, V];  peaks [M, S] fp32;  ids [M, S] int32;  tile_peaks [M, NUM_TILES] fp32
    Grid:    (M, S); a share is BLOCKS blocks of BLOCK_TILES tiles of TILE tokens
    """
    i_m = tl.program_id(0)
    i_s = tl.program_id(1)
    p_row = logits_ptr + i_m.to(tl.int64) * stride
    b_peak = tl.full((BLOCK_TILES, TILE), float("-inf"), tl.float32)
    b_id = tl.zeros((BLOCK_TILES, TILE), tl.int32)
    for i in range(BLOCKS):
        o_tile = (i_s * BLOCKS + i) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
        o_v = o_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_x = tl.where(b_x == b_x, b_x, float("inf"))
        if HAS_TILE_PEAKS:
            p_tile = tile_peaks_ptr + i_m.to(tl.int64) * NUM_TILES + o_tile
            tl.store(p_tile, tl.max(b_x, 1), mask=o_tile < NUM_TILES)
        m_more = b_x > b_peak
        b_peak = tl.where(m_more, b_x, b_peak)
        b_id = tl.where(m_more, o_v, b_id)
    peak = tl.max(tl.max(b_peak, 1), 0)
    i_v = tl.min(tl.min(tl.where(b_peak == peak, b_id, V), 1), 0)
    i_share = i_m * tl.num_programs(1) + i_s
    tl.store(peaks_ptr + i_share, peak)
    tl.store(ids_ptr + i_share, i_v)


@triton.jit(do_not_specialize=VARYING)
def weigh_kernel(
    logits_ptr, peaks_ptr, rows_ptr, sums_ptr, stride, V, NUM_TILES, BLOCKS, SHARES,
    BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, TILE_S: tl.constexpr,
):  # fmt: skip
    """Sums of the weights of each tile, min_p applied. Greedy rows and those that are not finite are left out.

    Shapes:  logits [M, V];  peaks [M, SHARES] fp32;  rows [M, 5] int64;  sums [M, NUM_TILES] int64
    Grid:    (M, S) as for ``peak_kernel``
    """
    i_m = tl.program_id(0)
    i_s = tl.program_id(1)
    p_row = logits_ptr + i_m.to(tl.int64) * stride
    peak = load_peak(peaks_ptr, i_m, SHARES, TILE_S)
    scale, floor = load_scale(rows_ptr, i_m)
    if is_drawn(peak, scale):
        for i in range(BLOCKS):
            o_tile = (i_s * BLOCKS + i) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
            o_v = o_tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            b_score = load_scores(p_row, o_v, V, peak, scale)
            b_sum = tl.sum(tl.where(b_score >= floor, weigh(b_score), 0), 1)
            tl.store(sums_ptr + i_m.to(tl.int64) * NUM_TILES + o_tile, b_sum, mask=o_tile < NUM_TILES)


@triton.jit(do_not_specialize=VARYING)
def pick_kernel(
    logits_ptr, raw_peaks_ptr, peaks_ptr, ids_ptr, rows_ptr, positions_ptr, floors_ptr, sums_ptr, sampled_ptr,
    stride, V, NUM_TILES, SHARES,
    TILE: tl.constexpr, TILES: tl.constexpr, TILE_S: tl.constexpr,
    HAS_RAW: tl.constexpr, HAS_DRAWS: tl.constexpr, HAS_FLOORS: tl.constexpr,
):  # fmt: skip
    """Token id and fault of each row: the likeliest, or the first whose cumulative weight exceeds number x total.

    Shapes:  raw_peaks [M] fp32;  positions [M] int64;  floors [M] fp32;  sampled [2, M] int64;  others as above
    Grid:    (M,)
    """
    i_m = tl.program_id(0)
    peak = load_peak(peaks_ptr, i_m, SHARES, TILE_S)
    o_s = tl.arange(0, TILE_S)
    b_peak = tl.load(peaks_ptr + i_m * SHARES + o_s, mask=o_s < SHARES, other=float("nan"))
    b_id = tl.load(ids_ptr + i_m * SHARES + o_s, mask=o_s < SHARES, other=V)
    i_v = tl.minimum(tl.min(tl.where(b_peak == peak, b_id, V), 0), V - 1)
    finite = tl.abs(peak) < float("inf")
    fault = tl.where(finite, FAULT_OK, FAULT_NOT_FINITE)
    if HAS_RAW:
        raw_finite = tl.abs(tl.load(raw_peaks_ptr + i_m)) < float("inf")
        fault = tl.where(raw_finite, tl.where(finite, FAULT_OK, FAULT_ALL_MASKED), FAULT_NOT_FINITE)
    if HAS_DRAWS:
        scale, floor = load_scale(rows_ptr, i_m)
        if is_drawn(peak, scale):
            if HAS_FLOORS:
                floor = tl.load(floors_ptr + i_m)
            o_tile = tl.arange(0, TILES)
            p_sums = sums_ptr + i_m.to(tl.int64) * NUM_TILES
            b_sums = tl.cumsum(tl.load(p_sums + o_tile, mask=o_tile < NUM_TILES, other=0), 0)
            total = tl.max(b_sums, 0)
            number = load_number(rows_ptr, positions_ptr, i_m)
            # The product may round up to the total.
            target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
            i_tile = tl.sum((b_sums <= target).to(tl.int32), 0)
            target -= tl.max(tl.where(b_sums <= target, b_sums, 0), 0)
            o_v = i_tile * TILE + tl.arange(0, TILE)
            b_score = load_scores(logits_ptr + i_m.to(tl.int64) * stride, o_v, V, peak, scale)
            b_sums = tl.cumsum(tl.where(b_score >= floor, weigh(b_score), 0), 0)
            i_v = i_tile * TILE + tl.sum((b_sums <= target).to(tl.int32), 0)
    tl.store(sampled_ptr + i_m, i_v.to(tl.int64))
    tl.store(sampled_ptr + tl.num_programs(0) + i_m, fault.to(tl.int64))


@triton.jit
def load_peak(peaks_ptr, i_m, SHARES, TILE_S: tl.constexpr):
    """The row's largest logit; +inf if it has a NaN."""
    o_s = tl.arange(0, TILE_S)
    return tl.max(tl.load(peaks_ptr + i_m * SHARES + o_s, mask=o_s < SHARES, other=float("-inf")), 0)


@triton.jit
def load_scale(rows_ptr, i_m):
    """Scale and floor of a row's scores."""
    p_row = rows_ptr + i_m * SETTINGS
    scale = tl.load(p_row).to(tl.float64, bitcast=True).to(tl.float32)
    return scale, tl.load(p_row + 1).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def is_drawn(peak, scale):
    return (scale > 0) & (tl.abs(peak) < float("inf"))


@triton.jit
def load_scores(p_row, o_v, V, peak, scale):
    """Scores, at most 0, in units of log2; -inf beyond the vocabulary."""
    b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
    return (b_x - peak) * scale


@triton.jit
def weigh(b_score):
    """See ``reference.weigh``."""
    b_score = tl.maximum(b_score, -60.0)
    b_whole = b_score + MAGIC
    b_rest = b_score - (b_whole - MAGIC)
    b_power = ((((b_rest * C5 + C4) * b_rest + C3) * b_rest + C2) * b_rest + C1) * b_rest + C0
    b_bits = b_power.to(tl.int32, bitcast=True) + (b_whole.to(tl.int32, bitcast=True) << 23)
    return b_bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def load_number(rows_ptr, positions_ptr, i_m):
    """The row's number in [0, 1); see ``settings.uniform``."""
    state = tl.load(rows_ptr + i_m * SETTINGS + 4) ^ tl.load(positions_ptr + i_m)
    value = state.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    return (value >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
