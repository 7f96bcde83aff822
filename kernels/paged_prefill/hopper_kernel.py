"""Prefill attention of ``kernel.py`` for Hopper: tensor cores multiply with V while the next tile's softmax runs.

It gives the same bits. In the plain kernel each product ends before what comes next begins. Here a turn launches the
scores of tile j + 1 and the product of tile j with V one behind the other, and waits for the latter only when the
softmax of tile j + 1 is done. The copy engine fetches the keys of tile j + 2 and the values of tile j + 1 meanwhile,
into the places that the turn before has read.

Tiles that every row sees come first, then the sink's, then the others, which are masked: bytes behind a request's last
token may be a NaN. Every tile comes by the copy engine; values that are not written are replaced by zeros where they
lie, since 0 x NaN is NaN. Pages have 2 bytes an element, and D is a power of two.

Shapes, units, grid: those of ``prefill_kernel``, without a window and a soft cap
Source:  FlashAttention-3 (arXiv 2407.08608), section 3.2: softmax beside products within a warpgroup
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..soft_cap import LOG2_E

# Names that later versions of Gluon have other ones for.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def tile_in_pages(i, full_tiles, sink_tiles):
    """Whether tile ``i`` is the sink's, and its number among the sink's or all other tiles."""
    is_sink = (i >= full_tiles) & (i < full_tiles + sink_tiles)
    return is_sink, gl.where(is_sink, i - full_tiles, gl.where(i < full_tiles, i, i - sink_tiles))


@gluon.jit
def first_rows(i, pages, span, i_h, D: gl.constexpr, T: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr):
    """The first rows of a tile's keys and values; those of the last tile for one behind it."""
    p_addresses, num_sinks, k_offset, v_offset = pages
    full_tiles, sink_tiles, num_tiles, _, _ = span
    PAGE_TILES: gl.constexpr = T // TILE
    is_sink, i_tile = tile_in_pages(gl.minimum(i, num_tiles - 1), full_tiles, sink_tiles)
    address = gl.load(p_addresses + gl.where(is_sink, 0, num_sinks + i_tile // PAGE_TILES))
    # A sink's slot is smaller than a block's in proportion to its tokens, and so are the offsets in it.
    num_page_tokens = gl.where(is_sink, S, T)
    row = i_h * num_page_tokens + gl.where(is_sink, i_tile, i_tile % PAGE_TILES) * TILE
    k = (address + k_offset // T * num_page_tokens) // (2 * D)
    v = (address + v_offset // T * num_page_tokens) // (2 * D)
    return k.to(gl.int32) + row, v.to(gl.int32) + row


@gluon.jit
def tokens_of(i, span, T: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Positions [TILE] of a tile's tokens, and which of them are written."""
    full_tiles, sink_tiles, _, position, end = span
    PAGE_TILES: gl.constexpr = T // TILE
    is_sink, i_tile = tile_in_pages(i, full_tiles, sink_tiles)
    o = gl.arange(0, TILE, layout=LAYOUT)
    o_t = gl.where(is_sink, i_tile, i_tile % PAGE_TILES) * TILE + o
    o_position = gl.where(is_sink, 0, position) + i_tile * TILE + o
    return o_position, (o_t < gl.where(is_sink, S, T)) & (o_position < end)


@gluon.jit
def hide_unseen(b_s, b_position, i, span, T: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr):
    """Scores [BLOCK_M, TILE] without those of tokens that a row does not see."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, b_s.type.layout)
    o_position, b_t = tokens_of(i, span, T, S, TILE, LAYOUT)
    b_seen = gl.expand_dims(b_t, 0) & (gl.expand_dims(o_position, 0) <= gl.expand_dims(b_position, 1))
    return gl.where(b_seen, b_s, float("-inf"))


@gluon.jit
def clear_unwritten(s_v, i, span, T: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeros in place of the values of tokens that are not written."""
    _, b_t = tokens_of(i, span, T, S, TILE, gl.SliceLayout(1, LAYOUT))
    b_v = s_v.load(LAYOUT)
    s_v.store(gl.where(gl.expand_dims(b_t, 1), b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    barrier()


@gluon.jit
def fetch(rows, k_row, v_row, s_ready, s_k, s_v, NBYTES: gl.constexpr):
    """Has a tile of keys and one of values copied; ``s_ready`` tells when both are there."""
    mbarrier.expect(s_ready, 2 * NBYTES)
    async_load(rows, [k_row, 0], s_ready, s_k)
    async_load(rows, [v_row, 0], s_ready, s_v)


@gluon.jit
def soften(b_s, b_m, b_l, scale_log2, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Weights of a tile of scores, and (m, l) with it; earlier sums shrink by the last result."""
    b_top = gl.maximum(b_m, gl.max(b_s, 1) * scale_log2)
    b_shrink = gl.exp2(b_m - b_top)
    b_p = gl.exp2(b_s * scale_log2 - gl.expand_dims(b_top, 1))
    b_l = b_l * b_shrink + gl.sum(b_p, 1)
    return gl.convert_layout(b_p.to(DTYPE), P_LAYOUT), b_top, b_l, b_shrink


@gluon.jit
def scaled(b_acc, b_factor):
    """``b_acc`` [BLOCK_M, D] with its rows times ``b_factor`` [BLOCK_M]."""
    return b_acc * gl.expand_dims(gl.convert_layout(b_factor, gl.SliceLayout(1, b_acc.type.layout)), 1)


@gluon.jit
def attend_turns(
    from_turn, to_turn, pages, span, state, b_position, fetched, i_h, rows, shared, scale_log2,
    IS_MASKED: gl.constexpr, T: gl.constexpr, S: gl.constexpr, IO_LAYOUT: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """For j of the turns the product of tile j with V, beside the scores and the softmax of tile j + 1.

    ``state``: weights of tile ``from_turn`` and (m, l, acc) with it. ``fetched``: first rows that the next turn has
    fetched, of the keys of tile j + 2 and the values of tile j + 1, and those of the values behind them.
    """
    b_p, b_m, b_l, b_acc = state
    s_q, s_k, s_v, s_ready = shared
    BLOCK_M: gl.constexpr = s_q.shape[0]
    TILE: gl.constexpr = s_k.shape[1]
    D: gl.constexpr = s_k.shape[2]
    P_LAYOUT: gl.constexpr = b_p.type.layout
    full_tiles = span[0]
    k_row, v_row, next_v_row = fetched
    for j in range(from_turn, to_turn):
        here, there = j % 2, (j + 1) % 2
        mbarrier.wait(s_ready.index(here), j // 2 % 2)
        if IS_MASKED and j >= full_tiles:
            clear_unwritten(s_v.index(here), j, span, T, S, TILE, IO_LAYOUT)
        b_s = gl.zeros([BLOCK_M, TILE], gl.float32, S_LAYOUT)
        b_s = warpgroup_mma(s_q, s_k.index(there).permute((1, 0)), b_s, use_acc=False, is_async=True)
        b_acc = warpgroup_mma(b_p, s_v.index(here), b_acc, is_async=True)
        barrier()  # both warpgroups have tile j's scores and tile j - 1's product, whose places are free
        fetch(rows, k_row, v_row, s_ready.index(there), s_k.index(here), s_v.index(there), TILE * D * 2)
        v_row = next_v_row
        k_row, next_v_row = first_rows(j + 3, pages, span, i_h, D, T, S, TILE)
        b_s = warpgroup_mma_wait(1, deps=[b_s])
        if IS_MASKED:
            b_s = hide_unseen(b_s, b_position, j + 1, span, T, S, TILE)
        b_next, b_m, b_l, b_shrink = soften(b_s, b_m, b_l, scale_log2, P_LAYOUT, rows.dtype)
        b_acc, b_p, b_next = warpgroup_mma_wait(0, deps=[b_acc, b_p, b_next])
        b_p = b_next
        b_acc = scaled(b_acc, b_shrink)
    return (b_p, b_m, b_l, b_acc), (k_row, v_row, next_v_row)


@gluon.jit(do_not_specialize=["from_block", "to_block"])
def prefill_hopper_kernel(
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
    IS_STAGED: gl.constexpr,
    IS_LAST: gl.constexpr,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    T: gl.constexpr,
    S: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TILE: gl.constexpr,
):
    WARPS: gl.constexpr = [BLOCK_M // 16, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    IO_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], WARPS, [1, 0])
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    PAGE_TILES: gl.constexpr = T // TILE
    # Heads vary fastest, so that the heaviest tiles of all heads start before any light one.
    i_h, i_tile = gl.program_id(0), gl.program_id(1)
    i_row = gl.load(tiles_ptr + i_tile * 3)
    num_tokens = gl.load(tiles_ptr + i_tile * 3 + 1)
    start = gl.load(tiles_ptr + i_tile * 3 + 2)
    first = gl.load(runs_ptr + i_tile * 4)
    num_sinks = gl.load(runs_ptr + i_tile * 4 + 1)
    num_blocks = gl.load(runs_ptr + i_tile * 4 + 2)
    position = gl.load(runs_ptr + i_tile * 4 + 3)
    if IS_STAGED:  # entries from_block to to_block of ``blocks`` are staged, and no row sees less at their end
        num_sinks = 0
        first_block = gl.maximum(gl.load(blocks_ptr + from_block) - first, 0)
        num_blocks = gl.minimum(gl.load(blocks_ptr + to_block - 1) + 1 - first, num_blocks) - first_block
        first += first_block
        num_tiles = num_blocks * PAGE_TILES
        full_tiles = gl.maximum(num_tiles, 0)
        end = 0
    else:
        end = start + num_tokens
        full_tiles = gl.minimum(gl.maximum(start + 1 - position, 0) // TILE, num_blocks * PAGE_TILES)
        num_tiles = gl.minimum((gl.maximum(end - position, 0) + TILE - 1) // TILE, num_blocks * PAGE_TILES)
    sink_tiles = num_sinks * ((S + TILE - 1) // TILE)
    num_tiles += sink_tiles
    p_addresses = addresses_ptr + gl.where(num_tiles > 0, first, 0)
    num_tiles = gl.maximum(num_tiles, 1)  # where there is none, one of which no row sees anything
    pages = (p_addresses, num_sinks, k_offset, v_offset)
    span = (full_tiles, sink_tiles, num_tiles, position, end)

    s_ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    s_k = gl.allocate_shared_memory(rows.dtype, [2, TILE, D], rows.layout)
    s_v = gl.allocate_shared_memory(rows.dtype, [2, TILE, D], rows.layout)
    for i in gl.static_range(3):
        mbarrier.init(s_ready.index(i), count=1)
    fence_async_shared()
    barrier()
    k_row, v_row = first_rows(0, pages, span, i_h, D, T, S, TILE)
    mbarrier.expect(s_ready.index(2), TILE * D * 2)
    async_load(rows, [k_row, 0], s_ready.index(2), s_k.index(0))
    k_row, next_v_row = first_rows(1, pages, span, i_h, D, T, S, TILE)
    fetch(rows, k_row, v_row, s_ready.index(0), s_k.index(1), s_v.index(0), TILE * D * 2)
    k_row, v_row = first_rows(2, pages, span, i_h, D, T, S, TILE)
    fetched = (k_row, next_v_row, v_row)

    # Queries and results pass through shared memory, where they have the layout of the tensor cores.
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, IO_LAYOUT))
    o_d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, IO_LAYOUT)), 0)
    o_n, o_head = (i_row + o_m // G).to(gl.int64), i_h * G + o_m % G
    b_mask = gl.expand_dims(o_m // G < num_tokens, 1)
    p_q = q_ptr + gl.expand_dims(o_n * stride_q_n + o_head * stride_q_h, 1) + o_d
    s_q = gl.allocate_shared_memory(rows.dtype, [BLOCK_M, D], rows.layout)
    s_q.store(gl.load(p_q, mask=b_mask, other=0.0).to(rows.dtype))
    fence_async_shared()
    barrier()

    o_token, o_group = gl.arange(0, BLOCK_M, layout=ROW_S) // G, gl.arange(0, BLOCK_M, layout=ROW_S) % G
    b_position, b_m_mask = start + o_token, o_token < num_tokens
    o_state = (i_row + o_token).to(gl.int64) * (H * G) + i_h * G + o_group
    p_o = o_ptr + gl.expand_dims(gl.convert_layout(o_state, ROW_O) * D, 1)
    p_o += gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
    b_o_mask = gl.expand_dims(gl.convert_layout(b_m_mask, ROW_O), 1)
    if IS_STAGED:
        b_m = gl.load(lse_ptr + o_state, mask=b_m_mask, other=0.0)
        b_l = gl.full([BLOCK_M], 1.0, gl.float32, ROW_S)
        b_acc = gl.load(p_o, mask=b_o_mask, other=0.0)
    else:
        b_m = gl.full([BLOCK_M], -1e30, gl.float32, ROW_S)
        b_l = gl.zeros([BLOCK_M], gl.float32, ROW_S)
        if null_logits_ptr is not None:
            b_m = gl.load(null_logits_ptr + i_h * G + o_group).to(gl.float32) * LOG2_E
            b_l = gl.full([BLOCK_M], 1.0, gl.float32, ROW_S)
        b_acc = gl.zeros([BLOCK_M, D], gl.float32, O_LAYOUT)

    mbarrier.wait(s_ready.index(2), 0)
    b_s = gl.zeros([BLOCK_M, TILE], gl.float32, S_LAYOUT)
    b_s = warpgroup_mma(s_q, s_k.index(0).permute((1, 0)), b_s, use_acc=False)
    if full_tiles == 0:
        b_s = hide_unseen(b_s, b_position, 0, span, T, S, TILE)
    b_p, b_m, b_l, b_shrink = soften(b_s, b_m, b_l, scale_log2, P_LAYOUT, rows.dtype)
    b_acc = scaled(b_acc, b_shrink)
    state, shared = (b_p, b_m, b_l, b_acc), (s_q, s_k, s_v, s_ready)
    turn, last = gl.maximum(full_tiles - 1, 0), num_tiles - 1
    state, fetched = attend_turns(
        0, turn, pages, span, state, b_position, fetched, i_h, rows, shared, scale_log2,
        False, T, S, IO_LAYOUT, S_LAYOUT,
    )  # fmt: skip
    state, fetched = attend_turns(
        turn, last, pages, span, state, b_position, fetched, i_h, rows, shared, scale_log2,
        True, T, S, IO_LAYOUT, S_LAYOUT,
    )  # fmt: skip
    b_p, b_m, b_l, b_acc = state
    mbarrier.wait(s_ready.index(last % 2), last // 2 % 2)
    if last >= full_tiles:
        clear_unwritten(s_v.index(last % 2), last, span, T, S, TILE, IO_LAYOUT)
    b_acc = warpgroup_mma(b_p, s_v.index(last % 2), b_acc)
    b_out = b_acc / gl.expand_dims(gl.convert_layout(gl.maximum(b_l, 1e-30), ROW_O), 1)
    if IS_LAST:
        barrier()
        OUT: gl.constexpr = out_ptr.dtype.element_ty  # of 2 bytes, as the pages' elements, if another one
        s_q.store(b_out.to(OUT).to(rows.dtype, bitcast=True))
        barrier()
        # Loaded again: kept all along, rows and their mask would not fit the registers.
        o_n = (gl.load(tiles_ptr + i_tile * 3, volatile=True) + o_m // G).to(gl.int64)
        b_mask = gl.expand_dims(o_m // G < gl.load(tiles_ptr + i_tile * 3 + 1, volatile=True), 1)
        p_out = out_ptr + gl.expand_dims(o_n * stride_out_n + o_head * stride_out_h, 1) + o_d
        gl.store(p_out, s_q.load(IO_LAYOUT).to(OUT, bitcast=True), mask=b_mask)
    else:
        gl.store(p_o, b_out, mask=b_o_mask)
        gl.store(lse_ptr + o_state, b_m + gl.log2(gl.maximum(b_l, 1e-30)), mask=b_m_mask)
