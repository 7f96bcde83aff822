"""The device functions of dense sides: ``[H][page tokens][D]`` elements, token rows contiguous."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..family import TritonOps

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def load_tile(
    p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    p = p_codes.to(tl.pointer_type(SIDE.STORED), bitcast=True)
    o_d = tl.arange(0, BLOCK_D)
    o_row = (i_h * num_page_tokens + o_t) * D
    b_mask = b_t[:, None] & (o_d < D)[None, :]
    return tl.load(p + o_row[:, None] + o_d[None, :], mask=b_mask, other=0.0).to(DTYPE)


@triton.jit
def seal_head(
    p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Copies elements, non-finite ones too. See ``TritonOps``."""
    o_d = tl.arange(0, TILE_D)[None, :]
    p_out = p_codes.to(tl.pointer_type(SIDE.STORED)) + i_h * (T * D) + tl.arange(0, T)[:, None] * D + o_d
    tl.store(p_out, b_raw, mask=o_d < D)


DENSE_TRITON = TritonOps(load_tile, seal_head, None, lambda side: None)
