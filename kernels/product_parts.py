"""Device functions that products of few rows and those of experts share: rows of a weight, columns, biases."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_rows(i_p, N, GATED: tl.constexpr, FULL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Int64 numbers [BLOCK_N] of a program's rows of a weight, with GATED a gate's and its up's by turns.

    Rows beyond the last one repeat it, which needs no mask; with FULL there are none, and addresses are simpler.
    """
    o_n = i_p.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        o_n = o_n // 2 + o_n % 2 * (N // 2)
    return o_n if FULL else tl.minimum(o_n, N - 1)


@triton.jit
def load_columns(p, o_k, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr):
    """Columns ``o_k`` of rows of K, zeros beyond."""
    if K % BLOCK_K == 0:
        return tl.load(p + o_k, eviction_policy=EVICTION)
    else:
        return tl.load(p + o_k, mask=o_k < K, other=0.0, eviction_policy=EVICTION)


@triton.jit
def load_bias(bias_ptr, o_n):
    """Float32 [BLOCK_N], zeros without a bias."""
    if bias_ptr is None:
        return tl.zeros_like(o_n).to(tl.float32)
    else:
        return tl.load(bias_ptr + o_n).to(tl.float32)
