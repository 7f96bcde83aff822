"""Sealing in Triton: one program a (block, side of a layer, KV head), the whole [T, D] tile in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import BlockLayout, DenseSide, Side, UniformSide
from ..planes import shrink_codes, store_codes
from ..side_table import Kind, side_table

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def seal_kernel(
    memory_ptr, src_ptr, dst_ptr, sides_ptr, finite_ptr, NUM_SIDES, H,
    KINDS: tl.constexpr, DTYPE: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Codes and (min, range) of one head of one side; see ``reference.quantize`` for the arithmetic.

    Shapes:  memory [M] uint8;  src, dst [n] int64;  sides [NUM_SIDES, 3] int64 (kind, source offset, target offset);
             finite [n] int64, set to 0 for a block with a NaN or an infinity
    Grid:    (n * NUM_SIDES * H,)
    """
    i_h = tl.program_id(0) % H
    i_side = tl.program_id(0) // H % NUM_SIDES
    i_n = tl.program_id(0) // H // NUM_SIDES
    kind = tl.load(sides_ptr + 3 * i_side)
    source = tl.load(src_ptr + i_n) + tl.load(sides_ptr + 3 * i_side + 1)
    target = tl.load(dst_ptr + i_n) + tl.load(sides_ptr + 3 * i_side + 2)
    p_source = (memory_ptr + tl.multiple_of(source, 16)).to(tl.pointer_type(DTYPE)) + i_h * (T * D)
    p_target = memory_ptr + tl.multiple_of(target, 16)
    o_t = tl.arange(0, T)
    o_d = tl.arange(0, TILE_D)
    o_x = o_t[:, None] * D + o_d[None, :]
    m_d = o_d[None, :] < D
    b_raw = tl.load(p_source + o_x, mask=m_d, other=0.0)
    b_x = b_raw.to(tl.float32)
    # 32752: half of fp16's largest value, so that min and range are both finite in fp16. As integers the bits of
    # absolute values have the same order, and those of infinities and NaNs are above all others.
    b_bits = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(tl.max(b_bits, 1), 0) > 0x46FFE000:
        m_finite = tl.abs(b_x) < float("inf")
        if tl.min(tl.min(m_finite.to(tl.int32), 1), 0) == 0:
            tl.store(finite_ptr + i_n, 0)
        b_x = tl.where(m_finite, tl.minimum(tl.maximum(b_x, -32752.0), 32752.0), 0.0)
    for i in tl.static_range(len(KINDS)):
        if kind == i:
            if KINDS[i][0] == 16:
                tl.store(p_target.to(tl.pointer_type(DTYPE)) + i_h * (T * D) + o_x, b_raw, mask=m_d)
            elif KINDS[i][1]:
                _seal_channels(p_target, b_x, i_h, KINDS, i, T, D, TILE_D)
            else:
                _seal_tokens(p_target, b_x, i_h, KINDS, i, T, D, TILE_D)


@triton.jit
def _seal_channels(
    p_target, b_x, i_h, KINDS: tl.constexpr, KIND: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr
):
    """Groups of tokens of one channel: (min, range) [2][groups][D]."""
    GROUP: tl.constexpr = KINDS[KIND][3]
    GROUPS: tl.constexpr = KINDS[KIND][4]
    b_x = tl.reshape(b_x, (GROUPS, GROUP, TILE_D))
    b_low, b_span = _min_range(tl.min(b_x, 1), tl.max(b_x, 1))
    b_codes = _quantize(b_x, b_low.to(tl.float32)[:, None, :], b_span.to(tl.float32)[:, None, :], KINDS[KIND][0])
    o_g = tl.arange(0, GROUPS)
    o_d = tl.arange(0, TILE_D)
    p_meta = (p_target + KINDS[KIND][7] + i_h * KINDS[KIND][6]).to(tl.pointer_type(tl.float16))
    p_meta = p_meta + o_g[:, None] * D + o_d[None, :]
    tl.store(p_meta, b_low, mask=o_d[None, :] < D)
    tl.store(p_meta + GROUPS * D, b_span, mask=o_d[None, :] < D)
    _store_rest(p_target, tl.reshape(b_codes, (T, TILE_D)), b_span, i_h, KINDS, KIND, D)


@triton.jit
def _seal_tokens(
    p_target, b_x, i_h, KINDS: tl.constexpr, KIND: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr
):
    """Groups of channels of one token: (min, range) [groups][meta lanes][meta planes][2]."""
    GROUP: tl.constexpr = KINDS[KIND][3]
    GROUPS: tl.constexpr = KINDS[KIND][4]
    TILE_G: tl.constexpr = TILE_D if GROUPS == 1 else GROUP  # a single group may end before the tile does
    TILE_GROUPS: tl.constexpr = TILE_D // TILE_G
    o_d = tl.reshape(tl.arange(0, TILE_D), (1, TILE_GROUPS, TILE_G))
    m_d = o_d < D
    b_x = tl.reshape(b_x, (T, TILE_GROUPS, TILE_G))
    o_g = tl.arange(0, TILE_GROUPS)
    m_g = o_g[None, :] < GROUPS
    b_min = tl.where(m_g, tl.min(tl.where(m_d, b_x, float("inf")), 2), 0.0)
    b_max = tl.where(m_g, tl.max(tl.where(m_d, b_x, float("-inf")), 2), 0.0)
    b_low, b_span = _min_range(b_min, b_max)
    b_codes = _quantize(b_x, b_low.to(tl.float32)[:, :, None], b_span.to(tl.float32)[:, :, None], KINDS[KIND][0])
    o_t = tl.arange(0, T)
    p_meta = (p_target + KINDS[KIND][7] + i_h * KINDS[KIND][6]).to(tl.pointer_type(tl.float16))
    p_meta = p_meta + 2 * (
        o_g[None, :] * T + (o_t % KINDS[KIND][5] * (T // KINDS[KIND][5]) + o_t // KINDS[KIND][5])[:, None]
    )
    tl.store(p_meta, b_low, mask=m_g)
    tl.store(p_meta + 1, b_span, mask=m_g)
    _store_rest(p_target, tl.reshape(b_codes, (T, TILE_D)), b_span, i_h, KINDS, KIND, D)


@triton.jit
def _store_rest(p_target, b_codes, b_span, i_h, KINDS: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr):
    """Codes, and the head's largest range."""
    T: tl.constexpr = b_codes.shape[0]
    store_codes(p_target + i_h * (T * KINDS[KIND][0] // 8 * D), b_codes, KINDS[KIND][0], KINDS[KIND][2], D)
    top = tl.max(tl.max(b_span.to(tl.float32), 1), 0)
    tl.store((p_target + KINDS[KIND][8]).to(tl.pointer_type(tl.float16)) + i_h, top.to(tl.float16))


@triton.jit
def _min_range(b_min, b_max):
    """min rounded down and range rounded up to fp16, which every value then lies within."""
    b_min = b_min + 0.0  # -0 becomes +0
    b_low = b_min.to(tl.float16)
    bits = b_low.to(tl.int16, bitcast=True)
    below = tl.where(bits < 0, bits + 1, bits - 1).to(tl.int16)
    b_low = tl.where(b_low.to(tl.float32) > b_min, below, bits).to(tl.float16, bitcast=True)
    b_range = b_max - b_low.to(tl.float32)
    b_span = b_range.to(tl.float16)
    bits = b_span.to(tl.int16, bitcast=True)
    above = (bits + 1).to(tl.int16)
    b_span = tl.where(b_span.to(tl.float32) < b_range, above, bits).to(tl.float16, bitcast=True)
    return b_low, b_span


@triton.jit
def _quantize(b_x, b_low, b_span, BITS: tl.constexpr):
    b_divisor = tl.where(b_span > 0, b_span, 1.0)
    b_inverse = tl.math.div_rn(tl.full(b_divisor.shape, 1.0, tl.float32), b_divisor)
    b_scaled = (b_x - b_low) * (7.0 if BITS == 3 else 255.0)
    # The quotient rounded once: the divisor has eleven bits, so that no quotient lies near enough to the middle of two
    # floats for one correction by the exact rest not to decide it.
    b_level = b_scaled * b_inverse
    b_level = tl.fma(tl.fma(-b_level, b_divisor, b_scaled), b_inverse, b_level)
    # Adding 1.5 * 2^23 rounds to the nearest integer, halves to even, and leaves it in the low bits.
    b_codes = (b_level + 12582912.0).to(tl.int32, bitcast=True) & 255
    return b_codes if BITS == 3 else shrink_codes(b_codes, 8, BITS)


def seal_triton(
    memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout, finite: Tensor
) -> None:
    """See ``seal``."""
    sides = side_table(source, target, _kind, memory.device)
    if sides is None or len(src) == 0:
        return
    dense = sides.first
    assert isinstance(dense, DenseSide)
    tile_d = triton.next_power_of_2(dense.head_dim)
    grid = (len(src) * len(sides.rows) * dense.num_kv_heads,)
    seal_kernel[grid](
        memory, src, dst, sides.rows, finite, len(sides.rows), dense.num_kv_heads,
        KINDS=sides.kinds, DTYPE=DTYPES[dense.dtype], T=dense.num_tokens, D=dense.head_dim, TILE_D=tile_d,
        num_warps=max(4, tile_d // 32), enable_fp_fusion=False,
    )  # fmt: skip


def _kind(old: Side, side: Side) -> Kind | None:
    """(bits, per channel?, K?, group, groups, meta lanes, meta stride, meta offset, top offset); (16,) for dense.

    Of sides that are dense before.
    """
    if not isinstance(old, DenseSide):
        return None
    if not isinstance(side, UniformSide):
        return (16,)
    per_channel, is_k = int(side.axis == "channel"), int(side.side == "k")
    return (
        side.bits, per_channel, is_k, side.group, side.num_groups,
        side.meta_lanes, side.head_meta_nbytes, side.meta_offset, side.top_offset,
    )  # fmt: skip
