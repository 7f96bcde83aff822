"""Formats of states in Triton: columns of a head are read and written, and states rewritten in a narrower format."""

from __future__ import annotations

import triton
import triton.language as tl

from qkv_engine.table_words import RUNG_BITS

from . import formats

BITS, STEPS = tl.constexpr(RUNG_BITS), tl.constexpr((1 << RUNG_BITS) - 1)  # of a word
LEVELS, LEAST = tl.constexpr(float(formats.LEVELS)), tl.constexpr(formats.LEAST)


@triton.jit
def slot_of(memory_ptr, word):
    """Where the slot begins that a word of the block tables names."""
    return memory_ptr + tl.multiple_of(word >> BITS, 16)


@triton.jit
def conv_of(memory_ptr, word, CONVS: tl.constexpr):
    """Where the convolution's state begins: as many bytes into the slot as ``CONVS`` has for its format."""
    offset = tl.zeros([], dtype=tl.int64) + CONVS[0]
    for i in tl.static_range(1, len(CONVS)):
        offset = tl.where((word & STEPS) == i, CONVS[i], offset)
    return slot_of(memory_ptr, word) + tl.multiple_of(offset, 16)


@triton.jit
def offsets(i_h, o_k, o_v, DK: tl.constexpr, DV: tl.constexpr):
    """Where some elements of a head are [BLOCK_K, BLOCK_V]; a thread has 4 of a row, in whatever format.

    With other numbers threads would exchange elements through shared memory where a state has one of several formats.
    """
    return tl.max_contiguous((i_h * DK + o_k)[:, None] * DV + o_v[None, :], (1, 4))


@triton.jit
def load_state(
    memory_ptr, word, i_h, o_k, o_v, num_k, num_v,
    DK: tl.constexpr, DV: tl.constexpr, FORMATS: tl.constexpr,
):  # fmt: skip
    """``load_tile`` of the state that a word of the tables names, in its format, one of ``FORMATS``.

    Of each: its type, the bytes before its scales, and what its codes are shorter by than those of 16 bits.
    """
    p_slot = slot_of(memory_ptr, word)
    if len(FORMATS) == 1:
        b_state = load_tile(p_slot, i_h, o_k, o_v, num_k, num_v, DK, DV, FORMATS[0][0], FORMATS[0][1])
    else:
        b_state = tl.zeros([o_k.shape[0], o_v.shape[0]], dtype=tl.float32)
        for i in tl.static_range(len(FORMATS)):
            if (word & STEPS) == i:
                b_state = load_tile(p_slot, i_h, o_k, o_v, num_k, num_v, DK, DV, FORMATS[i][0], FORMATS[i][1])
    return b_state


@triton.jit
def store_state(
    memory_ptr, word, b_state, i_h, o_k, o_v, num_k, num_v,
    DK: tl.constexpr, DV: tl.constexpr, FORMATS: tl.constexpr,
):  # fmt: skip
    """``store_tile`` to the state that a word of the tables names; see ``load_state``."""
    p_slot = slot_of(memory_ptr, word)
    for i in tl.static_range(len(FORMATS)):
        if len(FORMATS) == 1 or (word & STEPS) == i:
            store_tile(
                p_slot, b_state, i_h, o_k, o_v, num_k, num_v, DK, DV, FORMATS[i][0], FORMATS[i][1], FORMATS[i][2]
            )


@triton.jit
def load_tile(
    p_slot, i_h, o_k, o_v, num_k, num_v,
    DK: tl.constexpr, DV: tl.constexpr, ELEMENT: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Elements below ``num_k`` and ``num_v`` of some columns of a head in float32, zeros for the others.

    Shapes:  p_slot, where a state begins;  o_k [BLOCK_K];  o_v [BLOCK_V];  returns [BLOCK_K, BLOCK_V]
             ELEMENT [HV, DK, DV] at the beginning, float32 [HV, DV] ``SCALES`` bytes behind it, if that is not 0
    """
    p_state = p_slot.to(tl.pointer_type(ELEMENT)) + offsets(i_h, o_k, o_v, DK, DV)
    b_state = tl.load(p_state, mask=(o_k < num_k)[:, None] & (o_v < num_v)[None, :], other=0).to(tl.float32)
    if SCALES > 0:
        p_scales = (p_slot + SCALES).to(tl.pointer_type(tl.float32)) + i_h * DV + o_v
        b_state *= tl.load(p_scales, mask=o_v < tl.where(num_k > 0, num_v, 0), other=0.0)[None, :]
    return b_state


@triton.jit
def store_tile(
    p_slot, b_state, i_h, o_k, o_v, num_k, num_v,
    DK: tl.constexpr, DV: tl.constexpr, ELEMENT: tl.constexpr, SCALES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Stores float32 elements; whole columns, of which those beyond the state are zeros. See ``formats.encode``."""
    p_state = p_slot.to(tl.pointer_type(ELEMENT)) + offsets(i_h, o_k, o_v, DK, DV)
    mask = (o_k < num_k)[:, None] & (o_v < num_v)[None, :]
    if SCALES > 0:
        b_size = tl.abs(b_state)
        b_size = tl.where(b_size < float("inf"), b_size, float("inf"))  # a NaN, too, leaves a scale that is not finite
        b_largest = tl.maximum(tl.max(b_size, 0), LEAST)
        b_levels = tl.full(b_largest.shape, LEVELS, tl.float32)
        b_codes = tl.floor(b_state * tl.math.div_rn(b_levels, b_largest)[None, :] + 0.5)
        b_codes = tl.minimum(tl.maximum(b_codes, -LEVELS), LEVELS).to(tl.int32)
        tl.store(p_state, narrow(b_codes, SHIFT).to(ELEMENT), mask=mask)
        p_scales = (p_slot + SCALES).to(tl.pointer_type(tl.float32)) + i_h * DV + o_v
        b_scales = tl.math.div_rn(b_largest, b_levels) * (1 << SHIFT)
        tl.store(p_scales, b_scales, mask=o_v < tl.where(num_k > 0, num_v, 0))
    else:
        tl.store(p_state, b_state, mask=mask)


@triton.jit
def narrow(b_codes, SHIFT: tl.constexpr):
    """Integer codes without their last ``SHIFT`` bits, rounded; halves to even ones."""
    if SHIFT > 0:
        b_codes = (b_codes + ((1 << SHIFT) // 2 - 1) + ((b_codes >> SHIFT) & 1)) >> SHIFT
    return b_codes


@triton.jit
def narrow_state_kernel(
    memory_ptr, src_ptr, dst_ptr, finite_ptr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OLD: tl.constexpr, OLD_SCALES: tl.constexpr, OLD_CONV: tl.constexpr, OLD_SHIFT: tl.constexpr,
    NEW: tl.constexpr, NEW_SCALES: tl.constexpr, NEW_CONV: tl.constexpr, NEW_SHIFT: tl.constexpr,
    CONV: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some columns of a head in another format, and a tile of the convolution's state as it is.

    Shapes:  memory [bytes] uint8;  src, dst [n] int64, addresses of slots, none of which overlap
             ``CONV`` bytes of the convolution, ``OLD_CONV`` and ``NEW_CONV`` bytes into the slots
             finite [n] int64: 0 is written for a state without scales whose elements are not all finite
    Grid:    (n, max(HV * cdiv(DV, BLOCK_V), cdiv(CONV, TILE)))
    """
    TILES: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    p_src = memory_ptr + tl.multiple_of(tl.load(src_ptr + tl.program_id(0)), 16)
    p_dst = memory_ptr + tl.multiple_of(tl.load(dst_ptr + tl.program_id(0)), 16)
    part = tl.program_id(1)
    o_byte = part * TILE + tl.arange(0, TILE)
    tl.store(p_dst + NEW_CONV + o_byte, tl.load(p_src + OLD_CONV + o_byte, mask=o_byte < CONV), mask=o_byte < CONV)
    i_h, o_k = part // TILES, tl.arange(0, BLOCK_K)
    o_v = part % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    num_k = tl.where(i_h < HV, DK, 0)
    if OLD_SCALES > 0:  # integers alone
        o_state = (i_h * DK + o_k)[:, None] * DV + o_v[None, :]
        mask = (o_k < num_k)[:, None] & (o_v < DV)[None, :]
        b_codes = tl.load(p_src.to(tl.pointer_type(OLD)) + o_state, mask=mask, other=0).to(tl.int32)
        b_codes = narrow(b_codes, NEW_SHIFT - OLD_SHIFT).to(NEW)
        tl.store(p_dst.to(tl.pointer_type(NEW)) + o_state, b_codes, mask=mask)
        o_scale, m_scale = i_h * DV + o_v, o_v < tl.where(i_h < HV, DV, 0)
        b_scales = tl.load((p_src + OLD_SCALES).to(tl.pointer_type(tl.float32)) + o_scale, mask=m_scale, other=0.0)
        b_scales *= 1 << (NEW_SHIFT - OLD_SHIFT)
        tl.store((p_dst + NEW_SCALES).to(tl.pointer_type(tl.float32)) + o_scale, b_scales, mask=m_scale)
    else:
        b_state = load_tile(p_src, i_h, o_k, o_v, num_k, DV, DK, DV, OLD, OLD_SCALES)
        num_bad = tl.sum(tl.sum(tl.where(tl.abs(b_state) < float("inf"), 0, 1), 0), 0)
        tl.store(finite_ptr + tl.program_id(0), 0, mask=num_bad > 0)
        store_tile(p_dst, b_state, i_h, o_k, o_v, num_k, DV, DK, DV, NEW, NEW_SCALES, NEW_SHIFT)
