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
        p_codes, p_meta + SIDE.INDEX, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE.RESIDUAL, H, T, D, BLOCK_D,
        tl.float32,
    )  # fmt: skip
    b_index = tl.load(p_meta + i_h * T + o_t, mask=b_t, other=NONE).to(tl.int32)
    return (b_x + load_patterns(p_bank, b_index, i_h, H, D, BLOCK_D)).to(DTYPE)


@triton.jit
def load_patterns(p_bank, b_index, i_h, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The patterns of a head at ``b_index`` [n], zeros for none: [n, BLOCK_D] float32."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = p_bank.to(tl.pointer_type(tl.float16)) + ((b_index * H + i_h) * D)[:, None] + o_d[None, :]
    return tl.load(p_rows, mask=(b_index != NONE)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
