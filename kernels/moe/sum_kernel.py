"""The products of few tokens in Triton, by multiplication and addition: a token reads its own experts' weights."""

from __future__ import annotations

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous
from ..product_parts import load_bias, load_columns, store_row, weight_rows


@triton.jit
def gate_up_sum_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, experts_ptr,
    E: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Inner features of a pair of token and expert; a program holds BLOCK_N rows of the weight in registers.

    The next kernel starts behind the wait: what ends before this kernel then needs no wait there.

    Shapes:  x [N, E];  weight [X, 2 INNER, E];  bias [X, 2 INNER] or None;  out [N TOP_K, INNER];  experts [N TOP_K]
    Grid:    (cdiv(2 INNER, BLOCK_N), N TOP_K)
    """
    PARTS: tl.constexpr = (E + BLOCK_K - 1) // BLOCK_K
    i_p, i_a, o_k = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_K)
    o_n = weight_rows(i_p, 2 * INNER, True, 2 * INNER % BLOCK_N == 0, BLOCK_N)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    o_n += tl.load(experts_ptr + i_a).to(tl.int64) * (2 * INNER)
    p_weight, p_x = weight_ptr + o_n[:, None] * E, x_ptr + i_a // TOP_K * E
    weights = ()
    for part in tl.static_range(PARTS):
        b_weight = load_columns(p_weight, part * BLOCK_K + o_k[None, :], E, BLOCK_K, "evict_first")
        weights += (b_weight,)  # type: ignore[assignment]
    b_bias = load_bias(bias_ptr, o_n)
    b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for part in tl.static_range(PARTS):
        b_x = load_columns(p_x, part * BLOCK_K + o_k, E, BLOCK_K, "")
        b_acc += weights[part].to(tl.float32) * b_x.to(tl.float32)[None, :]
    store_row(tl.sum(b_acc, 1), b_bias, out_ptr + i_a * INNER, i_p, 2 * INNER, True, ACTIVATION)


@triton.jit
def down_sum_kernel(
    inner_ptr, weight_ptr, bias_ptr, out_ptr, experts_ptr, weights_ptr,
    E: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The weighted sum of a token's experts, for BLOCK_N rows of the weights of STEP experts at a time.

    Experts and their weights ended before ``gate_up_sum_kernel`` let this one start, and the first step's rows of the
    weight are under way while that one runs. L1 is passed by: it may hold what lay there before.

    Shapes:  inner [N TOP_K, INNER];  weight [X, E, INNER];  bias [X, E] or None;  out [N, E]
             experts, weights [N TOP_K]
    Grid:    (cdiv(E, BLOCK_N), N)
    """
    let_next_start(OVERLAP)
    PARTS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    i_p, i_n, o_k = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_K)
    o_n = weight_rows(i_p, E, False, E % BLOCK_N == 0, BLOCK_N)
    b_out = tl.zeros([BLOCK_N], tl.float32)
    rows = ()
    for k in tl.static_range(TOP_K):
        if k % STEP == 0:
            rows = ()
            for j in tl.static_range(STEP):
                if k + j < TOP_K:
                    i_x = tl.load(experts_ptr + i_n * TOP_K + k + j, cache_modifier=".cg").to(tl.int64)
                    for part in tl.static_range(PARTS):
                        p_row = weight_ptr + (i_x * E + o_n)[:, None] * INNER
                        b_row = load_columns(p_row, part * BLOCK_K + o_k[None, :], INNER, BLOCK_K, "evict_first")
                        rows += (b_row,)  # type: ignore[assignment]
            if k == 0:
                wait_for_previous(OVERLAP)
        i_a = i_n * TOP_K + k
        b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for part in tl.static_range(PARTS):
            b_inner = load_columns(inner_ptr + i_a * INNER, part * BLOCK_K + o_k, INNER, BLOCK_K, "")
            b_acc += rows[k % STEP * PARTS + part].to(tl.float32) * b_inner.to(tl.float32)[None, :]
        b_bias = load_bias(bias_ptr, tl.load(experts_ptr + i_a).to(tl.int64) * E + o_n)
        b_product = (tl.sum(b_acc, 1) + b_bias).to(out_ptr.dtype.element_ty)
        b_out += tl.load(weights_ptr + i_a) * b_product.to(tl.float32)
    o_out = i_p * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + i_n * E + o_out, b_out.to(out_ptr.dtype.element_ty), mask=o_out < E)
