"""Demotion in Triton: one program a (block, side of a layer, KV head)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..layout import BlockLayout, Side, UniformSide
from ..side_table import Kind, side_table


@triton.jit
def demote_kernel(
    memory_ptr, src_ptr, dst_ptr, sides_ptr, NUM_SIDES, H,
    KINDS: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Shrinks the codes of one head of one side, or copies them where the format stays.

    Shapes:  memory [M] uint8;  src, dst [n] int64;  sides [NUM_SIDES, 3] int64 (kind, source offset, target offset)
    Grid:    (n * NUM_SIDES * H,)
    """
    i_h = tl.program_id(0) % H
    i_side = tl.program_id(0) // H % NUM_SIDES
    i_n = tl.program_id(0) // H // NUM_SIDES
    kind = tl.load(sides_ptr + 3 * i_side)
    source = tl.load(src_ptr + i_n) + tl.load(sides_ptr + 3 * i_side + 1)
    target = tl.load(dst_ptr + i_n) + tl.load(sides_ptr + 3 * i_side + 2)
    p_source = memory_ptr + tl.multiple_of(source, 16)
    p_target = memory_ptr + tl.multiple_of(target, 16)
    for i in tl.static_range(len(KINDS)):
        if kind == i:
            _demote_head(p_source, p_target, i_h, KINDS, i, T, D, TILE_D)


@triton.jit
def _demote_head(
    p_source, p_target, i_h, KINDS: tl.constexpr, KIND: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    FROM_BITS: tl.constexpr = KINDS[KIND][0]
    TO_BITS: tl.constexpr = KINDS[KIND][1]
    META: tl.constexpr = KINDS[KIND][3]
    p_from = p_source + i_h * (T * FROM_BITS // 8 * D)
    p_to = p_target + i_h * (T * TO_BITS // 8 * D)
    if FROM_BITS == TO_BITS:
        _copy(p_from, p_to, T * FROM_BITS // 8 * D)
    else:
        _shrink_planes(p_from, p_to, FROM_BITS, TO_BITS, KINDS[KIND][2], T, D, TILE_D)
    p_from = p_source + KINDS[KIND][6] + i_h * META
    p_to = p_target + KINDS[KIND][7] + i_h * META
    if KINDS[KIND][4] == KINDS[KIND][5]:
        _copy(p_from, p_to, META)
    else:
        _permute(p_from, p_to, META // 4, KINDS[KIND][4], KINDS[KIND][5], T)
    p_from = (p_source + KINDS[KIND][8]).to(tl.pointer_type(tl.uint16)) + i_h
    tl.store((p_target + KINDS[KIND][9]).to(tl.pointer_type(tl.uint16)) + i_h, tl.load(p_from))


@triton.jit
def _shrink_planes(
    p_from, p_to, FROM_BITS: tl.constexpr, TO_BITS: tl.constexpr, IS_K: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Plane f of source lanes [r * LANES, (r + 1) * LANES) becomes plane f * RUNS + r of the target's LANES lanes.

    Four bytes at a time: neighbouring channels of K, neighbouring lanes of V.
    """
    LANES: tl.constexpr = T * TO_BITS // 8
    RUNS: tl.constexpr = FROM_BITS // TO_BITS
    p_from = p_from.to(tl.pointer_type(tl.int32))
    p_to = p_to.to(tl.pointer_type(tl.int32))
    if IS_K:
        o_lane = tl.arange(0, LANES)[:, None]
        o_word = tl.arange(0, TILE_D // 4)[None, :]
        o_from = o_lane * (D // 4) + o_word
        o_to = o_from
        m_d = o_word < D // 4
    else:
        o_d = tl.arange(0, TILE_D)[:, None]
        o_word = tl.arange(0, LANES // 4)[None, :]
        o_from = o_d * (LANES * RUNS // 4) + o_word
        o_to = o_d * (LANES // 4) + o_word
        m_d = o_d < D
    b_words = tl.zeros_like(o_from)
    for r in tl.static_range(RUNS):
        b_from = tl.load(p_from + o_from + r * LANES * (D if IS_K else 1) // 4, mask=m_d, other=0)
        for f in tl.static_range(8 // FROM_BITS):
            b_codes = b_from
            if FROM_BITS < 8:
                b_codes = (b_from >> f * FROM_BITS) & (0x01010101 * ((1 << FROM_BITS) - 1))
            b_words |= _shrink_bytes(b_codes, FROM_BITS, TO_BITS) << (f * RUNS + r) * TO_BITS
    tl.store(p_to + o_to, b_words, mask=m_d)


@triton.jit
def _shrink_bytes(b_codes, FROM_BITS: tl.constexpr, TO_BITS: tl.constexpr):
    """Four codes a word, one a byte, by halves: X_b = ((2^b - 1)(X_2b + 2^(b-1) + 1)) >> 2b, in 3b bits of room."""
    if FROM_BITS == 8:
        b_even = ((b_codes & 0x00FF00FF) + 0x00090009) * 15
        b_odd = (((b_codes >> 8) & 0x00FF00FF) + 0x00090009) * 15
        b_codes = ((b_even >> 8) & 0x000F000F) | (b_odd & 0x0F000F00)
    if FROM_BITS >= 4 and TO_BITS <= 2:
        b_codes = (((b_codes + 0x03030303) * 3) >> 4) & 0x03030303
    if FROM_BITS >= 2 and TO_BITS == 1:
        b_codes = ((b_codes + 0x02020202) >> 2) & 0x01010101
    return b_codes


@triton.jit
def _copy(p_from, p_to, NBYTES: tl.constexpr):
    TILE_N: tl.constexpr = 2048
    for start in range(0, NBYTES, TILE_N):
        o_byte = start + tl.arange(0, TILE_N)
        m_byte = o_byte < NBYTES
        tl.store(p_to + o_byte, tl.load(p_from + o_byte, mask=m_byte, other=0), mask=m_byte)


@triton.jit
def _permute(p_from, p_to, PAIRS: tl.constexpr, FROM_LANES: tl.constexpr, TO_LANES: tl.constexpr, T: tl.constexpr):
    """(min, range) pairs of tokens from tiles [FROM_LANES][planes] to tiles [TO_LANES][planes]."""
    p_from = p_from.to(tl.pointer_type(tl.uint32))
    p_to = p_to.to(tl.pointer_type(tl.uint32))
    o_t = tl.arange(0, T)
    o_from = o_t % FROM_LANES * (T // FROM_LANES) + o_t // FROM_LANES
    o_to = o_t % TO_LANES * (T // TO_LANES) + o_t // TO_LANES
    for start in tl.static_range(0, PAIRS, T):
        tl.store(p_to + start + o_to, tl.load(p_from + start + o_from))


def demote_triton(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """See ``demote``."""
    sides = side_table(source, target, _kind, memory.device)
    if sides is None or len(src) == 0:
        return
    side = sides.first
    tile_d = triton.next_power_of_2(side.head_dim)
    grid = (len(src) * len(sides.rows) * side.num_kv_heads,)
    demote_kernel[grid](
        memory, src, dst, sides.rows, len(sides.rows), side.num_kv_heads,
        KINDS=sides.kinds, T=side.num_tokens, D=side.head_dim, TILE_D=tile_d, num_warps=8,
    )  # fmt: skip


def _kind(old: Side, new: Side) -> Kind | None:
    """(bits from, to, K?, metadata bytes a head, tile lanes from, to, metadata offset from, to, top offset from, to)

    Metadata per channel lies the same way at all bits; per token it is a tile that depends on them. Of sealed sides.
    """
    if not (isinstance(old, UniformSide) and isinstance(new, UniformSide)):
        return None
    lanes = (old.meta_lanes, new.meta_lanes) if old.axis == "token" else (1, 1)
    return (
        old.bits, new.bits, int(old.side == "k"), old.head_meta_nbytes, *lanes,
        old.meta_offset, new.meta_offset, old.top_offset, new.top_offset,
    )  # fmt: skip
