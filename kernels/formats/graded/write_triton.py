"""Writing a head of a graded side in Triton, from elements or from a wider uniform side."""

from __future__ import annotations

import triton
import triton.language as tl

from ..uniform.codes_triton import load_codes, shrink_codes, store_codes
from ..uniform.integer_channels import run_of
from ..uniform.integer_tiles import count
from ..uniform.seal_triton import min_range, quantize_codes
from .layout import MEAN_BITS

MEAN_WIDTH = tl.constexpr(MEAN_BITS)


@triton.jit
def seal_head(
    p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    b_low, b_span = min_range(tl.min(b_x, 0), tl.max(b_x, 0))
    b_codes = quantize_codes(b_x, b_low.to(tl.float32)[None, :], b_span.to(tl.float32)[None, :], 8)
    _write_head(p_codes, p_meta, b_codes, 8, b_low, b_span, i_h, SIDE, T, D, TILE_D)


@triton.jit
def demote_head(
    p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD: tl.constexpr, NEW: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``; ``OLD`` is uniform, of 8 or 4 bits, in one group a channel."""
    o_t, o_d = tl.arange(0, T), tl.arange(0, TILE_D)
    m_x = tl.broadcast_to((o_d < D)[None, :], (T, TILE_D))
    b_codes = load_codes(p_codes + i_h * OLD.CODES, o_t, o_d, m_x, OLD.BITS, OLD.IS_K, T, D)
    p_pairs = (p_meta + i_h * OLD.META).to(tl.pointer_type(tl.float16))
    b_low = tl.load(p_pairs + o_d, mask=o_d < D, other=0.0)
    b_span = tl.load(p_pairs + D + o_d, mask=o_d < D, other=0.0)
    _write_head(p_to_codes, p_to_meta, b_codes, OLD.BITS, b_low, b_span, i_h, NEW, T, D, TILE_D)


@triton.jit
def _write_head(
    p_codes, p_meta, b_codes, BITS: tl.constexpr, b_low, b_span, i_h, SIDE: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Codes of ``BITS`` bits [T, TILE_D] int32 and (min, range) [TILE_D] fp16 as the bytes of head ``i_h``."""
    p_codes += i_h * SIDE.CODES
    for i in tl.static_range(count(SIDE.RUNS)):
        _store_run(p_codes, b_codes, BITS, run_of(SIDE, i), SIDE.IS_K, T, TILE_D)
    o_d = tl.arange(0, TILE_D)
    m_coded = o_d < SIDE.CODED
    p_top = (p_meta + SIDE.TOP).to(tl.pointer_type(tl.float16)) + i_h
    tl.store(p_top, tl.max(tl.where(m_coded, b_span.to(tl.float32), 0.0), 0).to(tl.float16))
    p_meta = (p_meta + i_h * SIDE.META).to(tl.pointer_type(tl.float16))
    tl.store(p_meta + o_d, b_low, mask=m_coded)
    tl.store(p_meta + SIDE.CODED + o_d, b_span, mask=m_coded)
    if SIDE.CODED < D:
        b_total = tl.sum(shrink_codes(b_codes, BITS, MEAN_WIDTH), 0)
        b_mean = mean_values(b_total, b_low.to(tl.float32), b_span.to(tl.float32), T)
        tl.store(p_meta + SIDE.CODED + o_d, b_mean, mask=(o_d >= SIDE.CODED) & (o_d < D))


@triton.jit
def _store_run(
    p_codes, b_codes, BITS: tl.constexpr, RUN: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr, TILE_D: tl.constexpr
):
    """Shrinks the codes of a run's channels and writes them."""
    b_run = shrink_codes(b_codes, BITS, RUN.BITS)
    store_codes(p_codes + RUN.CODES, b_run, RUN.BITS, IS_K, T, RUN.CHANNELS, TILE_D, RUN.FIRST)


@triton.jit
def mean_values(b_total, b_low, b_span, T: tl.constexpr):
    """Means in fp16 of channels by the sums of their 4-bit codes; see ``reference.mean_values``."""
    LEVELS: tl.constexpr = (2**MEAN_WIDTH - 1) * T
    b_product = b_span * b_total.to(tl.float32)
    return (tl.math.div_rn(b_product, tl.full(b_product.shape, LEVELS, tl.float32)) + b_low).to(tl.float16)
