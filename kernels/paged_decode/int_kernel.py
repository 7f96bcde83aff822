"""Decode attention over sealed pages with integer dots; K's and V's device functions know the bytes.

Shapes:  q [B, HQ, D];  arena [nbytes] uint8;  offsets [R, 4] int64: K's codes, K's metadata, V's codes and V's metadata
         from a slot's address on, one row a rung;  items [W, 5] int32: request, first block, blocks, part, rung;
         item_first [R + 1] int32: a rung's items are ``item_first[rung] .. item_first[rung + 1] - 1``;
         addresses [n] int64;  banks [B] int64, ``None`` for sides without patterns, which lie ``k_bank`` and ``v_bank``
         bytes behind;  positions [n] int32 and lengths [B] int32 as in ``DecodeWork``, ``None`` without a window;
         o [parts, HQ, D] float32;  lse [parts, HQ] float32
Units:   addresses and offsets in bytes; lse in log2
Grid:    at least the items of rungs ``first_rung .. last_rung - 1`` times H; one program per item and KV head, heads
         first, since they lie side by side in a page; the G = HQ / H query heads share its pages
Source:  FlashAttention-2 (arXiv 2307.08691); flash-decoding split-KV
"""

import triton
import triton.language as tl

from ..formats.uniform.integer_codes import tile_lanes
from ..overlap import begin_in_chain, wait_for_previous, wait_in_chain, wait_in_loop
from ..soft_cap import soft_cap


@triton.jit(do_not_specialize=["first_rung", "last_rung"])
def decode_int_kernel(
    q_ptr,
    stride_q_b,
    stride_q_h,
    arena_ptr,
    offsets_ptr,
    items_ptr,
    item_first_ptr,
    first_rung,
    last_rung,
    addresses_ptr,
    o_ptr,
    lse_ptr,
    scale_log2,
    banks_ptr,
    k_bank,
    v_bank,
    positions_ptr,
    lengths_ptr,
    QUERY: tl.constexpr,
    SCORES: tl.constexpr,
    BEGIN: tl.constexpr,
    ADD: tl.constexpr,
    FINISH: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILES: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr = False,
    IS_FIRST: tl.constexpr = False,
):
    """One item of one KV head. ``QUERY`` and ``SCORES`` are K's, ``BEGIN``, ``ADD`` and ``FINISH`` V's functions.

    ``WINDOW`` hides the first tokens of the item's first block alone: the plan leaves out the blocks before it.
    ``EARLY``: the first pages are asked for before the wait, since only the query is written right before.
    """
    begin_in_chain(IS_FIRST, OVERLAP)
    i_w, i_h = tl.load(item_first_ptr + first_rung) + tl.program_id(0) // H, tl.program_id(0) % H
    if i_w >= tl.load(item_first_ptr + last_rung):
        if tl.program_id(0) == 0:  # one that waits suffices: all others make room
            wait_for_previous(OVERLAP)
        return
    p_item = items_ptr + i_w * 5
    num_blocks = tl.load(p_item + 2)
    if num_blocks == 0:
        wait_for_previous(OVERLAP)
        return
    i_b, first = tl.load(p_item).to(tl.int64), tl.load(p_item + 1)
    part, p_offsets = tl.load(p_item + 3).to(tl.int64), offsets_ptr + tl.load(p_item + 4) * 4
    k_codes = tl.multiple_of(tl.load(p_offsets), 16)
    k_meta = tl.multiple_of(tl.load(p_offsets + 1), 16)
    v_codes = tl.multiple_of(tl.load(p_offsets + 2), 16)
    v_meta = tl.multiple_of(tl.load(p_offsets + 3), 16)

    o_g = tl.arange(0, BLOCK_G)
    b_heads = o_g < G
    p_q = q_ptr + i_b * stride_q_b + (i_h * G + o_g) * stride_q_h
    p_k_bank, p_v_bank = arena_ptr, arena_ptr
    if banks_ptr is not None:
        p_bank = arena_ptr + tl.multiple_of(tl.load(banks_ptr + i_b), 16)
        p_k_bank, p_v_bank = p_bank + k_bank, p_bank + v_bank
    if EARLY:  # zeros, which stand for the query until the first page is there
        query = QUERY(p_q, p_k_bank, i_h, o_g < 0, scale_log2, K, D, BLOCK_G)
    else:
        wait_in_chain(IS_FIRST, OVERLAP)
        query = QUERY(p_q, p_k_bank, i_h, b_heads, scale_log2, K, D, BLOCK_G)
    sums = BEGIN(V, TILES, T, D, BLOCK_G)
    b_m = tl.full([BLOCK_G], -1e30, tl.float32)
    b_l = tl.zeros([T // TILES, BLOCK_G], tl.float32)
    if WINDOW is not None:
        num_hidden = tl.load(lengths_ptr + i_b) - WINDOW - tl.load(positions_ptr + first)
        o_token = tl.arange(0, TILES)[None, None, :] * (T // TILES) + tile_lanes(T // TILES)[:, None, None]
    for i in tl.range(first, first + num_blocks, num_stages=STAGES):
        if EARLY and i == first:
            p_now = wait_in_loop(p_q, IS_FIRST, OVERLAP)
            query = QUERY(p_now, p_k_bank, i_h, b_heads, scale_log2, K, D, BLOCK_G)
        p_slot = arena_ptr + tl.multiple_of(tl.load(addresses_ptr + i), 16)
        b_s = SCORES(query, p_slot + k_codes, p_slot + k_meta, i_h, K, TILES, T, D, BLOCK_G)
        b_s = soft_cap(b_s, SOFTCAP)
        if WINDOW is not None:
            b_s = tl.where(o_token >= tl.where(i == first, num_hidden, 0), b_s, float("-inf"))
        b_top = tl.maximum(b_m, tl.max(tl.max(b_s, 2), 0))
        b_shrink = tl.exp2(b_m - b_top)
        b_p = tl.exp2(b_s - b_top[None, :, None])
        b_l = b_l * b_shrink[None, :] + tl.sum(b_p, 2)
        b_m = b_top
        sums = ADD(sums, b_p, b_shrink, p_slot + v_codes, p_slot + v_meta, i_h, V, TILES, T, D, BLOCK_G)

    b_total = tl.sum(b_l, 0)
    row = part * (H * G) + i_h * G + o_g
    FINISH(sums, b_total, o_ptr + row * D, p_v_bank, i_h, b_heads, V, D)
    tl.store(lse_ptr + row, b_m + tl.log2(b_total), mask=b_heads)
    wait_for_previous(OVERLAP)
