"""A router's choice, and the order of tokens by expert, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous

TAKEN = tl.constexpr(-(2**63))  # below every key


@triton.jit
def route_kernel(
    logits_ptr, experts_ptr, weights_ptr,
    X: tl.constexpr, TOP_K: tl.constexpr, OVER_ALL: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The TOP_K largest logits of a row and their softmax, over all of the row with OVER_ALL.

    Keys are integers in the order of the logits, then of falling expert: none are equal, and a NaN is the largest.

    Shapes:  logits [N, X];  experts, weights [N, TOP_K]
    Grid:    (N,)
    """
    let_next_start(OVERLAP)
    i_n = tl.program_id(0).to(tl.int64)
    o_x, o_k = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    wait_for_previous(OVERLAP)
    b_logits = tl.load(logits_ptr + i_n * X + o_x, mask=o_x < X, other=float("-inf")).to(tl.float32)
    b_bits = tl.where(b_logits == 0.0, 0.0, b_logits).to(tl.int32, bitcast=True)  # -0 is 0
    b_order = tl.where(b_logits == b_logits, _flip(b_bits), 0x7FFFFFFF)
    b_keys = (b_order.to(tl.int64) << 32) | (BLOCK_X - o_x).to(tl.int64)
    b_keys = tl.where(o_x < X, b_keys, TAKEN)
    b_best = tl.full([BLOCK_K], TAKEN, tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(b_keys, 0)
        b_keys = tl.where(b_keys == best, TAKEN, b_keys)
        b_best = tl.where(o_k == k, best, b_best)
    b_experts = BLOCK_X - b_best.to(tl.int32)
    b_chosen = _flip((b_best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    b_chosen = tl.where(o_k < TOP_K, b_chosen, float("-inf"))
    peak = tl.sum(tl.where(o_k == 0, b_chosen, 0.0), 0)
    b_exp = tl.exp(b_chosen - peak)
    total = tl.sum(tl.exp(b_logits - peak) if OVER_ALL else b_exp, 0)
    o_out = i_n * TOP_K + o_k
    tl.store(experts_ptr + o_out, b_experts, mask=o_k < TOP_K)
    tl.store(weights_ptr + o_out, b_exp / total, mask=o_k < TOP_K)


@triton.jit
def _flip(b_bits):
    """A float's bits as an integer of the same order, and back."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["A", "T"])
def sort_kernel(
    experts_ptr, order_ptr, tiles_ptr, A, T,
    X: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Pairs of token and expert in the order of experts, and tiles of at most BLOCK_M pairs of one expert.

    A program counts all pairs and places those of its own expert; no program waits for another.

    Shapes:  experts [A];  order [A], numbers of pairs;  tiles [T, 4]: expert, first place, end, 0; -1 in unused ones
    Grid:    (X,)
    """
    let_next_start(OVERLAP)
    i_x, o_x, o_a = tl.program_id(0), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_A)
    wait_for_previous(OVERLAP)
    b_counts = tl.zeros([BLOCK_X], tl.int32)
    for i in range(0, A, BLOCK_A):
        b_experts = tl.load(experts_ptr + i + o_a, mask=i + o_a < A, other=X)
        b_counts += tl.histogram(b_experts, BLOCK_X)
    b_counts = tl.where(o_x < X, b_counts, 0)
    b_tiles = (b_counts + BLOCK_M - 1) // BLOCK_M
    count = tl.sum(tl.where(o_x == i_x, b_counts, 0), 0)
    first = tl.sum(tl.where(o_x < i_x, b_counts, 0), 0)
    tile = tl.sum(tl.where(o_x < i_x, b_tiles, 0), 0)

    end = first + count
    for place in range(first, end, BLOCK_M):
        _store_tile(tiles_ptr, tile, i_x, place, tl.minimum(place + BLOCK_M, end))
        tile += 1
    for unused in range(tl.sum(b_tiles, 0) + i_x, T, X):
        _store_tile(tiles_ptr, unused, -1, -1, -1)
    place = first
    for i in range(0, tl.where(count > 0, A, 0), BLOCK_A):
        b_is_mine = (tl.load(experts_ptr + i + o_a, mask=i + o_a < A, other=X) == i_x).to(tl.int32)
        tl.store(order_ptr + place - 1 + tl.cumsum(b_is_mine, 0), i + o_a, mask=b_is_mine > 0)
        place += tl.sum(b_is_mine, 0)


@triton.jit
def _store_tile(tiles_ptr, tile, expert, first, end):
    o = tl.arange(0, 4)
    tl.store(tiles_ptr + tile * 4 + o, tl.where(o == 0, expert, tl.where(o == 1, first, tl.where(o == 2, end, 0))))
