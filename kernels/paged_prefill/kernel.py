"""Prefill attention of query tiles over dense pages; launches for several rungs pass on their softmax state.

out[n, h] = softmax(scale q[n, h] . K) V over the tokens up to n's position, online over tiles of TILE tokens. With
``WINDOW`` the plan leaves out the blocks that no row of a tile sees, and the blocks that some row does not see from
their start, two at most, come with those that are seen up to a row's position.

Shapes:  q, out [N, HQ, D];  arena [nbytes] uint8;  rows [R, D], a descriptor of the same bytes by [TILE, BLOCK_D];
         tiles [M, 3], runs [M, 4], addresses, positions: ``PrefillWork``;  null_logits [HQ], ``None`` without;
         o [N, HQ, D] float32 and lse [N, HQ] float32, the state between launches
Units:   addresses and offsets in bytes, multiples of a row's; lse in log2
Grid:    (H, M); one program per KV head and query tile; row r is token r // G, query head r % G of the group
Source:  FlashAttention-2 (arXiv 2307.08691)
"""

import triton
import triton.language as tl

from ..formats.dense.triton import load_tile
from ..soft_cap import LOG2_E, soft_cap


@triton.jit
def attend_tile(b_q, b_k, b_v, b_m, b_l, b_acc, b_seen, IS_MASKED: tl.constexpr, scale_log2, SOFTCAP: tl.constexpr):
    """Continues (m, l, acc) over one tile of keys, of which each row sees ``b_seen`` [BLOCK_M, TILE]."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if SOFTCAP is not None:
        b_s = soft_cap(b_s * scale_log2, SOFTCAP)
        scale_log2 = 1.0
    if IS_MASKED:
        b_s = tl.where(b_seen, b_s, float("-inf"))
    b_top = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
    b_shrink = tl.exp2(b_m - b_top)
    b_p = tl.exp2(b_s * scale_log2 - b_top[:, None])
    b_l = b_l * b_shrink + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_top, b_l, b_acc


@triton.jit
def count_before(p_positions, num_blocks, position):
    """How many of a run's first two blocks begin before ``position``."""
    first = tl.load(p_positions, mask=num_blocks > 0, other=position)
    second = tl.load(p_positions + 1, mask=num_blocks > 1, other=position)
    return (first < position).to(tl.int32) + (second < position).to(tl.int32)


@triton.jit
def attend_full(
    b_q,
    b_m,
    b_l,
    b_acc,
    p_addresses,
    first_tile,
    num_tiles,
    i_h,
    rows,
    k_offset,
    v_offset,
    scale_log2,
    D: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Tiles ``first_tile`` to ``num_tiles`` of the blocks at ``p_addresses``, which every row sees entirely."""
    PAGE_TILES: tl.constexpr = T // TILE
    ROW_NBYTES: tl.constexpr = D * rows.dtype.primitive_bitwidth // 8
    for i in tl.range(first_tile, num_tiles, num_stages=STAGES):
        address = tl.load(p_addresses + i // PAGE_TILES)
        o_t = i_h * T + i % PAGE_TILES * TILE
        b_k = rows.load([((address + k_offset) // ROW_NBYTES).to(tl.int32) + o_t, 0])
        b_v = rows.load([((address + v_offset) // ROW_NBYTES).to(tl.int32) + o_t, 0])
        b_m, b_l, b_acc = attend_tile(b_q, b_k, b_v, b_m, b_l, b_acc, None, False, scale_log2, SOFTCAP)
    return b_m, b_l, b_acc


@triton.jit
def attend_partly(
    b_q,
    b_m,
    b_l,
    b_acc,
    b_position,
    end,
    p_addresses,
    p_positions,
    num_sinks,
    position,
    left_tiles,
    first_tile,
    num_tiles,
    i_h,
    arena_ptr,
    k_offset,
    v_offset,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The sink and then tiles ``first_tile`` to ``num_tiles`` of the blocks after it, up to each row's position.

    With ``WINDOW`` the first ``left_tiles`` of these blocks come in between, and each row sees its window.
    Tokens at or behind ``end`` may not be written and are not loaded.
    """
    PAGE_TILES: tl.constexpr = T // TILE
    sink_tiles = num_sinks * ((S + TILE - 1) // TILE)
    for i in tl.range(0, sink_tiles + left_tiles + num_tiles - first_tile, num_stages=STAGES):
        is_sink = i < sink_tiles
        i_tile = tl.where(is_sink, i, i - sink_tiles - left_tiles + first_tile)
        if WINDOW is not None:
            i_tile = tl.where((i >= sink_tiles) & (i < sink_tiles + left_tiles), i - sink_tiles, i_tile)
        num_page_tokens = tl.where(is_sink, S, T)
        o_t = tl.where(is_sink, i, i_tile % PAGE_TILES) * TILE + tl.arange(0, TILE)
        o_position = tl.where(is_sink, 0, position) + i_tile * TILE + tl.arange(0, TILE)
        address = tl.load(p_addresses + tl.where(is_sink, 0, num_sinks + i_tile // PAGE_TILES))
        # A sink's slot is smaller than a block's in proportion to its tokens, and so are the offsets in it.
        p_k = arena_ptr + tl.multiple_of(address + k_offset // T * num_page_tokens, 16)
        p_v = arena_ptr + tl.multiple_of(address + v_offset // T * num_page_tokens, 16)
        if WINDOW is not None:  # earlier blocks of the run may stand on other rungs
            i_block = tl.where(is_sink, 0, num_sinks + i_tile // PAGE_TILES)
            o_position = tl.load(p_positions + i_block) + o_t
        b_t = (o_t < num_page_tokens) & (o_position < end)
        b_k = load_tile(p_k, p_k, p_k, i_h, o_t, b_t, num_page_tokens, SIDE, H, T, D, BLOCK_D, SIDE.STORED)
        b_v = load_tile(p_v, p_v, p_v, i_h, o_t, b_t, num_page_tokens, SIDE, H, T, D, BLOCK_D, SIDE.STORED)
        b_seen = b_t[None, :] & (o_position[None, :] <= b_position[:, None])
        if WINDOW is not None:
            b_seen = b_seen & (o_position[None, :] > b_position[:, None] - WINDOW)
        b_m, b_l, b_acc = attend_tile(b_q, b_k, b_v, b_m, b_l, b_acc, b_seen, True, scale_log2, SOFTCAP)
    return b_m, b_l, b_acc


@triton.jit(do_not_specialize=["from_block", "to_block"])
def prefill_kernel(
    q_ptr,
    stride_q_n,
    stride_q_h,
    rows,
    k_offset,
    v_offset,
    tiles_ptr,
    runs_ptr,
    addresses_ptr,
    blocks_ptr,
    from_block,
    to_block,
    o_ptr,
    lse_ptr,
    out_ptr,
    stride_out_n,
    stride_out_h,
    scale_log2,
    null_logits_ptr,
    arena_ptr,
    positions_ptr,
    IS_STAGED: tl.constexpr,
    IS_LAST: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    # Heads vary fastest, so that the heaviest tiles of all heads start before any light one.
    i_h, i_tile = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(tiles_ptr + i_tile * 3)
    num_tokens = tl.load(tiles_ptr + i_tile * 3 + 1)
    start = tl.load(tiles_ptr + i_tile * 3 + 2)
    first = tl.load(runs_ptr + i_tile * 4)
    num_sinks = tl.load(runs_ptr + i_tile * 4 + 1)
    num_blocks = tl.load(runs_ptr + i_tile * 4 + 2)
    position = tl.load(runs_ptr + i_tile * 4 + 3)
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_token, o_head = o_m // G, i_h * G + o_m % G
    b_m_mask = o_token < num_tokens
    b_mask = b_m_mask[:, None] & (o_d < D)[None, :]
    o_n = (i_row + o_token).to(tl.int64)
    p_q = q_ptr + (o_n * stride_q_n + o_head * stride_q_h)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=b_mask, other=0.0).to(SIDE.STORED)
    o_state = o_n * (H * G) + o_head
    p_o = o_ptr + (o_state * D)[:, None] + o_d[None, :]
    PAGE_TILES: tl.constexpr = T // TILE
    p_addresses = addresses_ptr + first
    end = start + num_tokens
    p_positions = positions_ptr
    left_tiles = 0
    if WINDOW is not None:
        p_positions += first
        left_tiles = count_before(p_positions + num_sinks, num_blocks, end - WINDOW) * PAGE_TILES
    if IS_STAGED:  # entries from_block to to_block of ``blocks`` are staged, and no row sees less at their end
        b_m = tl.load(lse_ptr + o_state, mask=b_m_mask, other=0.0)
        b_l = tl.full([BLOCK_M], 1.0, tl.float32)
        b_acc = tl.load(p_o, mask=b_mask, other=0.0)
        first_tile = tl.maximum(tl.load(blocks_ptr + from_block) - first, 0) * PAGE_TILES
        num_tiles = tl.minimum(tl.load(blocks_ptr + to_block - 1) + 1 - first, num_blocks) * PAGE_TILES
        if WINDOW is not None:
            b_m, b_l, b_acc = attend_partly(
                b_q, b_m, b_l, b_acc, start + o_token, end, p_addresses, p_positions, 0, position, 0, first_tile,
                tl.minimum(num_tiles, left_tiles), i_h, arena_ptr, k_offset, v_offset, scale_log2, H, D, T, S, BLOCK_D,
                TILE, SIDE, TAIL_STAGES, WINDOW, SOFTCAP,
            )  # fmt: skip
            first_tile = tl.maximum(first_tile, left_tiles)
        b_m, b_l, b_acc = attend_full(
            b_q, b_m, b_l, b_acc, p_addresses, first_tile, num_tiles, i_h, rows, k_offset, v_offset, scale_log2,
            D, T, TILE, STAGES, SOFTCAP,
        )  # fmt: skip
    else:
        b_m = tl.full([BLOCK_M], -1e30, tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        if null_logits_ptr is not None:
            b_m = tl.load(null_logits_ptr + o_head).to(tl.float32) * LOG2_E
            b_l = tl.full([BLOCK_M], 1.0, tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        full_tiles = tl.minimum(tl.maximum(start + 1 - position, 0) // TILE, num_blocks * PAGE_TILES)
        num_tiles = tl.minimum((tl.maximum(end - position, 0) + TILE - 1) // TILE, num_blocks * PAGE_TILES)
        if WINDOW is not None:
            full_tiles = tl.maximum(full_tiles, left_tiles)
            num_tiles = tl.maximum(num_tiles, full_tiles)
        b_m, b_l, b_acc = attend_full(
            b_q, b_m, b_l, b_acc, p_addresses + num_sinks, left_tiles, full_tiles, i_h, rows, k_offset, v_offset,
            scale_log2, D, T, TILE, STAGES, SOFTCAP,
        )  # fmt: skip
        b_m, b_l, b_acc = attend_partly(
            b_q, b_m, b_l, b_acc, start + o_token, end, p_addresses, p_positions, num_sinks, position, left_tiles,
            full_tiles, num_tiles, i_h, arena_ptr, k_offset, v_offset, scale_log2, H, D, T, S, BLOCK_D, TILE, SIDE,
            TAIL_STAGES, WINDOW, SOFTCAP,
        )  # fmt: skip
    b_out = b_acc / tl.maximum(b_l, 1e-30)[:, None]
    if IS_LAST:
        p_out = out_ptr + (o_n * stride_out_n + o_head * stride_out_h)[:, None] + o_d[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=b_mask)
    else:
        tl.store(p_o, b_out, mask=b_mask)
        tl.store(lse_ptr + o_state, b_m + tl.log2(tl.maximum(b_l, 1e-30)), mask=b_m_mask)
