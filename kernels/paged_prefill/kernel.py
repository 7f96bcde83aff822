"""Prefill attention of query tiles over dense pages; launches for several rungs hand their state on.

out[n, h] = softmax(scale q[n, h] . K) V over the tokens up to n's position, online over tiles of TILE tokens.

Shapes:  q, out [N, HQ, D];  arena [nbytes] uint8;  tiles [N, 3], runs [N, 4], addresses, positions: ``PrefillWork``;
         o [N, HQ, D] float32 and lse [N, HQ] float32, the state between launches
Units:   addresses and offsets in bytes; lse in log2
Grid:    (N, H); one program per query tile and KV head; row r is token r // G, query head r % G of the group
Source:  FlashAttention-2 (arXiv 2307.08691)
"""

import triton
import triton.language as tl

from ..tiles.dense import load_dense


@triton.jit
def attend_tiles(
    b_q,
    b_m,
    b_l,
    b_acc,
    b_position,
    first,
    num_tiles,
    sink_tiles,
    gap,
    lower,
    upper,
    last_position,
    i_h,
    arena_ptr,
    k_offset,
    v_offset,
    addresses_ptr,
    positions_ptr,
    scale_log2,
    MASKED: tl.constexpr,
    STORED: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Continues (m, l, acc) over ``num_tiles`` tiles from block ``first``.

    With masks, the first ``sink_tiles`` are the sink's and ``gap`` blocks follow that are not this loop's; blocks
    outside ``lower`` to ``upper`` count as not visible.
    """
    PAGE_TILES: tl.constexpr = T // TILE
    for i in tl.range(0, num_tiles, num_stages=STAGES):
        num_page_tokens = T
        if MASKED:
            is_sink = i < sink_tiles
            i_tile = tl.where(is_sink, i, i - sink_tiles)
            i_block = first + i_tile // PAGE_TILES + tl.where(is_sink, 0, gap)
            o_t = (i_tile % PAGE_TILES) * TILE + tl.arange(0, TILE)
            position = tl.load(positions_ptr + i_block)
            if S > 0:
                num_page_tokens = tl.where(is_sink, S, T)
            num_visible = tl.minimum(num_page_tokens, last_position + 1 - position)
            b_t = o_t < tl.where((i_block >= lower) & (i_block < upper), num_visible, 0)
        else:
            i_block = first + i // PAGE_TILES
            o_t = (i % PAGE_TILES) * TILE + tl.arange(0, TILE)
            b_t = tl.full([TILE], True, tl.int1)
        address = tl.load(addresses_ptr + i_block)
        # The pages of a dense rung scale with their tokens: a sink's lie at proportionally smaller offsets.
        p_k = arena_ptr + tl.multiple_of(address + k_offset // T * num_page_tokens, 16)
        p_v = arena_ptr + tl.multiple_of(address + v_offset // T * num_page_tokens, 16)
        b_k = load_dense(p_k, i_h, o_t, b_t, num_page_tokens, False, 16, False, 0, STORED, H, T, D, BLOCK_D, DTYPE)
        b_v = load_dense(p_v, i_h, o_t, b_t, num_page_tokens, True, 16, False, 0, STORED, H, T, D, BLOCK_D, DTYPE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
        if MASKED:
            b_seen = b_t[None, :] & (position + o_t[None, :] <= b_position[:, None])
            b_s = tl.where(b_seen, b_s, float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_s, 1))
        b_shrink = tl.exp2(b_m - b_top)
        b_p = tl.exp2(b_s - b_top[:, None])
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(DTYPE), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_m = b_top
    return b_m, b_l, b_acc


@triton.jit
def prefill_kernel(
    q_ptr,
    stride_q_n,
    stride_q_h,
    arena_ptr,
    k_offset,
    v_offset,
    tiles_ptr,
    runs_ptr,
    addresses_ptr,
    positions_ptr,
    blocks_ptr,
    from_block,
    to_block,
    o_ptr,
    lse_ptr,
    out_ptr,
    stride_out_n,
    stride_out_h,
    scale_log2,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    IS_PIECE: tl.constexpr,
    STORED: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_tile, i_h = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(tiles_ptr + i_tile * 3)
    num_tokens = tl.load(tiles_ptr + i_tile * 3 + 1)
    start = tl.load(tiles_ptr + i_tile * 3 + 2)
    first = tl.load(runs_ptr + i_tile * 4)
    num_sinks = tl.load(runs_ptr + i_tile * 4 + 1)
    num_full = tl.load(runs_ptr + i_tile * 4 + 2)
    num_partial = tl.load(runs_ptr + i_tile * 4 + 3)
    last_position = start + num_tokens - 1
    first_full = first + num_sinks
    first_partial = first_full + num_full
    end_full = first_partial
    lower, upper = 0, 2147483647
    if IS_PIECE:  # only entries from_block to to_block of ``blocks`` are at hand
        lower = tl.load(blocks_ptr + from_block)
        upper = tl.load(blocks_ptr + to_block - 1) + 1
        first_full = tl.maximum(first_full, lower)
        end_full = tl.minimum(end_full, upper)
    sink_tiles = num_sinks * ((S + TILE - 1) // TILE)
    masked_tiles = sink_tiles
    if num_partial > 0:
        seen = last_position + 1 - tl.load(positions_ptr + first_partial + num_partial - 1)
        masked_tiles += (num_partial - 1) * (T // TILE) + (tl.minimum(seen, T) + TILE - 1) // TILE
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_token, o_head = o_m // G, i_h * G + o_m % G
    b_m_mask = o_token < num_tokens
    b_mask = b_m_mask[:, None] & (o_d < D)[None, :]
    o_n = (i_row + o_token).to(tl.int64)
    p_q = q_ptr + (o_n * stride_q_n + o_head * stride_q_h)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=b_mask, other=0.0).to(DTYPE)
    o_state = o_n * (H * G) + o_head
    p_o = o_ptr + (o_state * D)[:, None] + o_d[None, :]
    if IS_FIRST:
        b_m = tl.full([BLOCK_M], -1e30, tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    else:
        b_m = tl.load(lse_ptr + o_state, mask=b_m_mask, other=0.0)
        b_l = tl.full([BLOCK_M], 1.0, tl.float32)
        b_acc = tl.load(p_o, mask=b_mask, other=0.0)
    b_position = start + o_token
    num_tiles = tl.maximum(end_full - first_full, 0) * (T // TILE)
    b_m, b_l, b_acc = attend_tiles(
        b_q, b_m, b_l, b_acc, b_position, first_full, num_tiles, 0, 0, lower, upper, last_position,
        i_h, arena_ptr, k_offset, v_offset, addresses_ptr, positions_ptr, scale_log2, False,
        STORED, H, D, T, S, BLOCK_D, TILE, DTYPE, STAGES,
    )  # fmt: skip
    b_m, b_l, b_acc = attend_tiles(
        b_q, b_m, b_l, b_acc, b_position, first, masked_tiles, sink_tiles, num_sinks + num_full, lower, upper,
        last_position, i_h, arena_ptr, k_offset, v_offset, addresses_ptr, positions_ptr, scale_log2, True,
        STORED, H, D, T, S, BLOCK_D, TILE, DTYPE, STAGES,
    )  # fmt: skip
    b_out = b_acc / tl.maximum(b_l, 1e-30)[:, None]
    if IS_LAST:
        p_out = out_ptr + (o_n * stride_out_n + o_head * stride_out_h)[:, None] + o_d[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=b_mask)
    else:
        tl.store(p_o, b_out, mask=b_mask)
        tl.store(lse_ptr + o_state, b_m + tl.log2(tl.maximum(b_l, 1e-30)), mask=b_m_mask)
