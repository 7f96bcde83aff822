"""Decode attention over pages of one format with floating-point dots: dense pages, and codes without integer dots.

o[part, h] = softmax(scale q[b, h] . K) V over the blocks of one work item, with its log-sum-exp. ``WINDOW`` hides the
first tokens of an item's first block alone: the plan leaves out the blocks before it.

Shapes:  q [B, HQ, D];  arena [nbytes] uint8;  offsets [R, 4] as in ``LayerFormats``;  items [W, 5], item_first,
         addresses, positions, lengths, banks as in ``DecodeWork``, banks ``None`` for sides without patterns, which
         lie ``k_bank`` and ``v_bank`` bytes behind;  o [parts, HQ, D] float32;  lse [parts, HQ] float32
Units:   addresses and offsets in bytes; lse in log2, -inf where the item has no visible token
Grid:    (bound * H,); one program per work item on rungs first_rung to end_rung - 1 and KV head, heads first, since
         they lie side by side in a page; the G = HQ / H query heads share its tiles
Source:  FlashAttention-2 (arXiv 2307.08691); flash-decoding split-KV
"""

import triton
import triton.language as tl

from ..overlap import begin_in_chain, wait_for_previous, wait_in_chain
from ..soft_cap import soft_cap


@triton.jit(do_not_specialize=["first_rung", "end_rung"])
def decode_float_kernel(
    q_ptr,
    stride_q_b,
    stride_q_h,
    arena_ptr,
    offsets_ptr,
    items_ptr,
    item_first_ptr,
    first_rung,
    end_rung,
    addresses_ptr,
    positions_ptr,
    lengths_ptr,
    o_ptr,
    lse_ptr,
    scale_log2,
    banks_ptr,
    k_bank,
    v_bank,
    LOAD_K: tl.constexpr,
    K_SIDE: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_SIDE: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,
    IS_FIRST: tl.constexpr = False,
):
    begin_in_chain(IS_FIRST, OVERLAP)
    i_w, i_h = tl.load(item_first_ptr + first_rung) + tl.program_id(0) // H, tl.program_id(0) % H
    if i_w >= tl.load(item_first_ptr + end_rung):
        if tl.program_id(0) == 0:  # one that waits suffices: all others make room
            wait_for_previous(OVERLAP)
        return
    p_item = items_ptr + i_w * 5
    i_b = tl.load(p_item).to(tl.int64)
    first = tl.load(p_item + 1)
    num_blocks = tl.load(p_item + 2)
    part = tl.load(p_item + 3).to(tl.int64)
    p_offsets = offsets_ptr + tl.load(p_item + 4) * 4
    k_codes, k_meta = tl.load(p_offsets), tl.load(p_offsets + 1)
    v_codes, v_meta = tl.load(p_offsets + 2), tl.load(p_offsets + 3)
    length = tl.load(lengths_ptr + i_b)
    p_k_bank, p_v_bank = arena_ptr, arena_ptr
    if banks_ptr is not None:
        p_bank = arena_ptr + tl.multiple_of(tl.load(banks_ptr + i_b), 16)
        p_k_bank, p_v_bank = p_bank + k_bank, p_bank + v_bank
    o_g, o_d, o_tile = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    b_rows = (o_g < G)[:, None] & (o_d < D)[None, :]
    p_q = q_ptr + i_b * stride_q_b + (i_h * G + o_g[:, None]) * stride_q_h + o_d[None, :]

    b_m = tl.full([BLOCK_G], -1e30, tl.float32)
    b_l = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    # Only a run's first block can be short and only its last ones unwritten, so the loop loads no positions.
    PAGE_TILES: tl.constexpr = T // TILE
    first_tokens, first_written = T, T
    if S > 0:
        is_sink = tl.load(positions_ptr + first) < S
        first_tokens = tl.where(is_sink, S, T)
        first_written = tl.where(is_sink, tl.minimum(length, S), T)
    missing = T - tl.minimum(length - tl.load(positions_ptr + first + num_blocks - 1), T)
    num_visible = num_blocks * T - missing
    if WINDOW is not None:
        num_hidden = length - WINDOW - tl.load(positions_ptr + first)
    num_tiles = tl.maximum(num_visible + TILE - 1, 0) // TILE
    first_tiles = (first_written + TILE - 1) // TILE
    wait_in_chain(IS_FIRST, OVERLAP)
    b_q = tl.load(p_q, mask=b_rows, other=0.0, cache_modifier=".cg").to(DTYPE)
    for i in tl.range(0, tl.minimum(num_tiles, first_tiles) + tl.maximum(num_tiles - PAGE_TILES, 0), num_stages=STAGES):
        i_tile = i
        if S > 0:  # a short page ends early
            i_tile = tl.where(i < first_tiles, i, i + (PAGE_TILES - first_tiles))
        address = tl.load(addresses_ptr + first + i_tile // PAGE_TILES)
        o_t = (i_tile % PAGE_TILES) * TILE + o_tile
        b_t = i_tile * TILE + o_tile < num_visible
        num_page_tokens = T
        if S > 0:
            num_page_tokens = tl.where(i < first_tiles, first_tokens, T)
            b_t = b_t & (o_t < tl.where(i < first_tiles, first_written, T))
        if WINDOW is not None:
            b_t = b_t & (i_tile * TILE + o_tile >= num_hidden)
        # The pages of a dense rung scale with their tokens: short ones lie at proportionally smaller offsets.
        p_k = arena_ptr + tl.multiple_of(address + k_codes // T * num_page_tokens, 16)
        p_v = arena_ptr + tl.multiple_of(address + v_codes // T * num_page_tokens, 16)
        p_k_meta = arena_ptr + tl.multiple_of(address + k_meta, 16)
        p_v_meta = arena_ptr + tl.multiple_of(address + v_meta, 16)
        b_k = LOAD_K(p_k, p_k_meta, p_k_bank, i_h, o_t, b_t, num_page_tokens, K_SIDE, H, T, D, BLOCK_D, DTYPE)
        b_v = LOAD_V(p_v, p_v_meta, p_v_bank, i_h, o_t, b_t, num_page_tokens, V_SIDE, H, T, D, BLOCK_D, DTYPE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
        b_s = tl.where(b_t[None, :], soft_cap(b_s, SOFTCAP), float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_s, 1))
        b_shrink = tl.exp2(b_m - b_top)
        b_p = tl.exp2(b_s - b_top[:, None])
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(DTYPE), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_m = b_top

    row = part * (H * G) + i_h * G + o_g
    tl.store(o_ptr + row[:, None] * D + o_d[None, :], b_acc / tl.maximum(b_l, 1e-30)[:, None], mask=b_rows)
    tl.store(lse_ptr + row, tl.where(b_l > 0, b_m + tl.log2(b_l), float("-inf")), mask=o_g < G)
    wait_for_previous(OVERLAP)
