"""Soft cap of attention scores on the GPU: c tanh(s / c) of scores in log2."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap(b_s, CAP: tl.constexpr):
    """Scores ``b_s`` in log2, with the natural ones within +-``CAP``; ``None``: as they are."""
    if CAP is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), whose exponential may overflow
        b_s = CAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(b_s * (2.0 / CAP)) + 1.0))
    return b_s
