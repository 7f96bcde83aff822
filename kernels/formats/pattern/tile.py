"""Tile loader of pattern sides, dequantized, patterns added."""

from __future__ import annotations

import triton
import triton.language as tl

from ..uniform.tile import load_tile as load_residual
from .layout import NO_PATTERN

NONE = tl.constexpr(NO_PATTERN)


@triton.jit
def load_tile(
    p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    b_x = load_residual(
        p_codes, p_meta + SIDE.INDEX, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE, H, T, D, BLOCK_D,
        tl.float32,
    )  # fmt: skip
    b_index = tl.load(p_meta + i_h * T + index_byte(o_t, SIDE.IS_K, T), mask=b_t, other=NONE).to(tl.int32)
    b_pattern = load_patterns(p_bank, b_index, i_h, SIDE.STRIDE, D, BLOCK_D)
    return (b_x + b_pattern.to(tl.float32)).to(DTYPE)


@triton.jit
def index_byte(o_t, IS_K: tl.constexpr, T: tl.constexpr):
    """Offsets of tokens' indices from the first of their head."""
    return o_t % (T // 4) * 4 + o_t // (T // 4) if IS_K else o_t


@triton.jit
def load_patterns(p_bank, o_m, i_h, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The patterns ``o_m`` [n] of a head, zeros for ``NONE``: [n, BLOCK_D] fp16."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = p_bank.to(tl.pointer_type(tl.float16)) + (o_m * STRIDE + i_h * D)[:, None] + o_d[None, :]
    return tl.load(p_rows, mask=(o_m != NONE)[:, None] & (o_d < D)[None, :], other=0.0)
