"""The products of many tokens in Triton, on tensor cores: tiles of the tokens of one expert."""

from __future__ import annotations

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous
from ..product_parts import load_bias, load_columns, store_tile, weight_rows


@triton.jit
def expert_tile_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of an expert's weight times a tile of its pairs of token and expert.

    With ACTIVATION gate and up: from tokens' rows of ``x`` to places of ``out``, activated. Without it down: from
    places of ``x`` to pairs' rows of ``out``. Tiles of one expert are neighbours, which read its weight from L2.

    Shapes:  x [tokens or places, K];  weight [X, N, K];  bias [X, N] or None;  out [places, N / 2] or [pairs, N]
             order [places];  tiles [T, 4]
    Grid:    (cdiv(N, BLOCK_N), T)
    """
    let_next_start(OVERLAP)
    GATED: tl.constexpr = ACTIVATION is not None
    i_p, o_k = tl.program_id(0), tl.arange(0, BLOCK_K)
    o_n = weight_rows(i_p, N, GATED, N % BLOCK_N == 0, BLOCK_N)
    wait_for_previous(OVERLAP)
    p_tile = tiles_ptr + tl.program_id(1) * 4
    i_x, first, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    if i_x < 0:
        return
    o_place = first + tl.arange(0, BLOCK_M)
    m_m = o_place < end
    o_pair = tl.load(order_ptr + o_place, mask=m_m, other=0)
    o_row = (o_pair // TOP_K if GATED else o_place).to(tl.int64)
    o_n += i_x.to(tl.int64) * N
    p_x, p_weight = x_ptr + o_row[:, None] * K, weight_ptr + o_n[:, None] * K
    EVICTION: tl.constexpr = "evict_first" if BLOCK_M <= 32 else ""  # larger tiles have neighbours that read it again
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        b_weight = load_columns(p_weight, i + o_k[None, :], K, BLOCK_K, EVICTION)
        m_x = m_m[:, None] if K % BLOCK_K == 0 else m_m[:, None] & (i + o_k < K)[None, :]
        b_x = tl.load(p_x + i + o_k[None, :], mask=m_x, other=0.0)
        b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc, input_precision="ieee")
    o_to = (o_place if GATED else o_pair).to(tl.int64)
    store_tile(b_acc, load_bias(bias_ptr, o_n), out_ptr, i_p, o_to, m_m, N, GATED, ACTIVATION)


@triton.jit
def combine_kernel(
    pairs_ptr, weights_ptr, out_ptr,
    E: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a token's TOP_K rows of ``pairs``.

    Shapes:  pairs [N TOP_K, E];  weights [N TOP_K];  out [N, E]
    Grid:    (N * cdiv(E, TILE),)
    """
    let_next_start(OVERLAP)
    TILES: tl.constexpr = (E + TILE - 1) // TILE
    i_n = (tl.program_id(0) // TILES).to(tl.int64)
    o_e = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    m_e = o_e < E
    wait_for_previous(OVERLAP)
    b_out = tl.zeros([TILE], tl.float32)
    for k in tl.static_range(TOP_K):
        b_pair = tl.load(pairs_ptr + (i_n * TOP_K + k) * E + o_e, mask=m_e, other=0.0)
        b_out += tl.load(weights_ptr + i_n * TOP_K + k) * b_pair.to(tl.float32)
    tl.store(out_ptr + i_n * E + o_e, b_out.to(out_ptr.dtype.element_ty), mask=m_e)
