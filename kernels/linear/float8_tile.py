"""Products of 8-bit floats by 8-bit floats in Triton, for fewer rows than torch's scaled product is made for."""

from __future__ import annotations

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous
from ..product_parts import load_bias, load_columns, store_sums, store_tile, weight_rows


@triton.jit(do_not_specialize=["M"])
def float8_tile_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, N, M,
    K: tl.constexpr, BLOCKS: tl.constexpr, GATED: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, or with GATED its SwiGLU.

    With SPLITS each program has columns of its own and leaves sums for ``add_splits_kernel``. With BLOCKS, where
    BLOCK_K is 128, scales are those of 128 x 128 elements of the weight and of 128 columns of ``x``.

    Shapes:  x [M, K];  x_scales [M], with BLOCKS [cdiv(K, 128), M];  codes [N, K];  bias [N] or None
             scales [N], with BLOCKS [cdiv(N, 128), cdiv(K, 128)]
             out [M, N], with GATED [M, N / 2], with SPLITS float32 [SPLITS, M, the grid's tiles BLOCK_N]
    Grid:    (cdiv(N, BLOCK_N), cdiv(M, BLOCK_M), SPLITS)
    """
    let_next_start(OVERLAP)
    NUMBER: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = NUMBER // SPLITS
    i_p = tl.program_id(0)
    o_n = weight_rows(i_p, N, GATED, FULL, BLOCK_N)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < M
    o_x = tl.minimum(o_m, M - 1)
    o_k = tl.arange(0, BLOCK_K)
    first = tl.program_id(2) * PART
    p_codes, p_x = codes_ptr + o_n[:, None] * K, x_ptr + o_x.to(tl.int64)[:, None] * K
    p_scales = scales_ptr + (o_n // 128 * NUMBER + first if BLOCKS else o_n)
    p_x_scales = x_scales_ptr + (first * M + o_x if BLOCKS else o_x)
    b_scale = tl.load(p_scales)
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_previous(OVERLAP)

    b_x_scale = tl.load(p_x_scales)
    for i in tl.range(0, PART, num_stages=STAGES):
        o_column = ((first + i) * BLOCK_K + o_k)[None, :]
        b_codes = load_columns(p_codes, o_column, K, BLOCK_K, "evict_first" if BLOCK_M <= 32 else "")
        b_x = load_columns(p_x, o_column, K, BLOCK_K, "")
        if BLOCKS:
            b_now, b_x_now = b_scale, b_x_scale
            ahead = tl.minimum(i + 1, PART - 1)  # scales of the next step, on their way during this one
            b_scale, b_x_scale = tl.load(p_scales + ahead), tl.load(p_x_scales + ahead * M)
            b_acc += tl.dot(b_codes, tl.trans(b_x)) * (b_now[:, None] * b_x_now[None, :])
        else:
            b_acc = tl.dot(b_codes, tl.trans(b_x), b_acc)
    if not BLOCKS:
        b_acc *= b_scale[:, None] * b_x_scale[None, :]
    if SPLITS > 1:
        store_sums(b_acc, out_ptr, i_p, tl.num_programs(0), o_m, m_m, M)
    else:
        store_tile(b_acc, load_bias(bias_ptr, o_n), out_ptr, i_p, o_m.to(tl.int64), m_m, N, GATED)


@triton.jit(do_not_specialize=["M"])
def float8_bulk_kernel(
    x, codes, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, N, M,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias`` with a scale a row of both, tiles brought by bulk copies (Hopper).

    Shapes:  x [M, K];  codes [N, K];  x_scales [M];  scales [N];  bias [N] or None;  out [M, N]
    Grid:    (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N))
    """
    let_next_start(OVERLAP)
    COLUMNS: tl.constexpr = 128
    i_m, i_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    o_m, o_n = i_m + tl.arange(0, BLOCK_M), i_n + tl.arange(0, BLOCK_N)
    o_row = tl.minimum(o_n, N - 1)
    b_scale, b_bias = tl.load(scales_ptr + o_row), load_bias(bias_ptr, o_row)
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_previous(OVERLAP)

    for i in tl.range(0, K, COLUMNS, num_stages=STAGES):
        b_acc = tl.dot(x.load([i_m, i]), tl.trans(codes.load([i_n, i])), b_acc)
    b_out = b_acc * b_scale[None, :] * tl.load(x_scales_ptr + tl.minimum(o_m, M - 1))[:, None] + b_bias[None, :]
    p_out = out_ptr + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=(o_m < M)[:, None] & (o_n < N)[None, :])
