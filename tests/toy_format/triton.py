"""The device functions of sign sides."""

from __future__ import annotations

import triton
import triton.language as tl

from qkv_engine.kernels.formats.family import TritonOps


@triton.jit
def load_tile(
    p_codes, p_meta, p_bank, i_h, o_t, b_t, num_page_tokens, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    o_d = tl.arange(0, BLOCK_D)
    o_group = ((i_h * T + o_t) * SIDE.GROUPS)[:, None] + (o_d // 8)[None, :]
    m_x = b_t[:, None] & (o_d < D)[None, :]
    b_byte = tl.load(p_codes + o_group, mask=m_x, other=0).to(tl.int32)
    b_mean = tl.load(p_meta.to(tl.pointer_type(tl.float16)) + o_group, mask=m_x, other=0.0).to(tl.float32)
    return tl.where((b_byte >> (o_d % 8)[None, :]) & 1 == 1, b_mean, -b_mean).to(DTYPE)


@triton.jit
def seal_head(
    p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """See ``TritonOps``."""
    GROUPS: tl.constexpr = TILE_D // 8
    o_group = tl.arange(0, GROUPS)[None, :]
    m_group = o_group < SIDE.GROUPS
    o_out = (i_h * T + tl.arange(0, T)[:, None]) * SIDE.GROUPS + o_group
    b_bits = tl.reshape((b_x >= 0).to(tl.int32), (T, GROUPS, 8)) << tl.arange(0, 8)[None, None, :]
    tl.store(p_codes + o_out, tl.sum(b_bits, 2).to(tl.uint8), mask=m_group)
    b_sum = _add_neighbours(tl.reshape(tl.abs(b_x), (T, GROUPS, 4, 2)))
    b_sum = _add_neighbours(tl.reshape(b_sum, (T, GROUPS, 2, 2)))
    b_sum = _add_neighbours(b_sum)
    tl.store(p_meta.to(tl.pointer_type(tl.float16)) + o_out, (b_sum / 8).to(tl.float16), mask=m_group)


@triton.jit
def _add_neighbours(b_x):
    b_even, b_odd = tl.split(b_x)
    return b_even + b_odd


SIGN_TRITON = TritonOps(load_tile, seal_head, None, lambda side: None)
