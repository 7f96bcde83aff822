"""Sealing a head of a pattern side in Triton: choose patterns, subtract them, seal the residual as a uniform side."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import family
from ..uniform.demote_triton import demote_head as demote_residual
from ..uniform.seal_triton import seal_head as seal_residual
from .layout import NO_PATTERN
from .tile import index_byte, load_patterns

LIMIT = tl.constexpr(family.LIMIT)
NONE = tl.constexpr(NO_PATTERN)
FEW = tl.constexpr(32)  # patterns compared with tokens at a time; more take more registers


@triton.jit
def seal_head(
    p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps`` for the arguments, ``reference.quantize`` for the arithmetic."""
    b_index = _nearest(p_bank, num_windows, b_x, i_h, SIDE, b_raw.dtype, T, D, TILE_D)
    b_rest = b_x - load_patterns(p_bank, b_index, i_h, SIDE.STRIDE, D, TILE_D).to(tl.float32)
    if SIDE.IS_K:
        m_pays = tl.broadcast_to(_spread(b_rest, SIDE, TILE_D) < _spread(b_x, SIDE, TILE_D), (T,))
    else:
        m_d = (tl.arange(0, TILE_D) < D)[None, :]
        m_pays = _range(b_rest, m_d) <= _range(b_x, m_d) * SIDE.RHO
    b_index = tl.where(m_pays, b_index, NONE)
    tl.store(p_meta + i_h * T + index_byte(tl.arange(0, T), SIDE.IS_K, T), b_index.to(tl.uint8))
    b_rest = tl.where(m_pays[:, None], b_rest, b_x)
    b_rest = tl.minimum(tl.maximum(b_rest, -LIMIT), LIMIT)  # clamped like elements: ranges must be finite in fp16
    seal_residual(p_codes, p_meta + SIDE.INDEX, p_bank, num_windows, b_raw, b_rest, i_h, SIDE, H, T, D, TILE_D)


@triton.jit
def _nearest(
    p_bank, num_windows, b_x, i_h, SIDE: tl.constexpr, DTYPE: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """The nearest pattern of each token by Euclidean distance, the first of several."""
    COUNT: tl.constexpr = min(SIDE.ROWS, FEW)
    b_best = tl.full([T], float("inf"), tl.float32)
    b_index = tl.zeros([T], tl.int32)
    for first in range(0, SIDE.ROWS, COUNT):
        o_m = first + tl.arange(0, COUNT)
        b_m = load_patterns(p_bank, o_m, i_h, SIDE.STRIDE, D, TILE_D)
        b_wide = b_m.to(tl.float32)
        b_distance = tl.sum(b_wide * b_wide, 1)[None, :] - 2 * _products(b_x, b_m, DTYPE)
        if SIDE.LATER > 0:
            m_visible = o_m < SIDE.MINED + tl.minimum(num_windows, SIDE.LATER)
            b_distance = tl.where(m_visible[None, :], b_distance, float("inf"))
        b_least, b_at = tl.min(b_distance, 1, return_indices=True)
        b_index = tl.where(b_least < b_best, (first + b_at).to(tl.int32), b_index)
        b_best = tl.minimum(b_best, b_least)
    return b_index


@triton.jit
def _products(b_x, b_m, DTYPE: tl.constexpr):
    """Products of tokens [T, TILE_D], float32 out of ``DTYPE``, and patterns [n, TILE_D] fp16; only sums round."""
    if tl.float16 == DTYPE:
        b_dot = tl.dot(b_x.to(tl.float16), tl.trans(b_m))
    elif tl.bfloat16 == DTYPE:  # two bf16 numbers hold an fp16 one
        b_high = b_m.to(tl.bfloat16)
        b_low = (b_m.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16)
        b_dot = tl.dot(b_x.to(tl.bfloat16), tl.trans(b_high))
        b_dot = tl.dot(b_x.to(tl.bfloat16), tl.trans(b_low), b_dot)
    else:
        b_dot = tl.dot(b_x, tl.trans(b_m.to(tl.float32)), input_precision="ieee")
    return b_dot


@triton.jit
def _spread(b_x, SIDE: tl.constexpr, TILE_D: tl.constexpr):
    """The sum of the ranges of all groups of tokens in float64, where order does not matter."""
    b_x = tl.reshape(b_x, (SIDE.GROUPS, SIDE.GROUP, TILE_D))
    return tl.sum(tl.sum((tl.max(b_x, 1) - tl.min(b_x, 1)).to(tl.float64), 1), 0)


@triton.jit
def _range(b_x, m_d):
    return tl.max(tl.where(m_d, b_x, float("-inf")), 1) - tl.min(tl.where(m_d, b_x, float("inf")), 1)


@triton.jit
def demote_head(
    p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD: tl.constexpr, NEW: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    o_t = i_h * T + tl.arange(0, T)
    tl.store(p_to_meta + o_t, tl.load(p_meta + o_t))
    demote_residual(p_codes, p_meta + OLD.INDEX, p_to_codes, p_to_meta + NEW.INDEX, i_h, OLD, NEW, H, T, D, TILE_D)
