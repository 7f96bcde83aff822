"""The gated activation between the products of experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate(b_gate, b_up, ACTIVATION: tl.constexpr):
    """The gated activation that the ``SwiGLU`` record says, in the dtype of its operands."""
    b_wide_gate, b_wide_up = b_gate.to(tl.float32), b_up.to(tl.float32)
    if ACTIVATION.limit is not None:
        b_wide_gate = _at_most(b_wide_gate, ACTIVATION.limit)
        b_wide_up = -_at_most(-_at_most(b_wide_up, ACTIVATION.limit), ACTIVATION.limit)
    b_gated = (b_wide_gate / (1.0 + tl.exp(-ACTIVATION.alpha * b_wide_gate))).to(b_gate.dtype).to(tl.float32)
    return (b_gated * (b_wide_up + ACTIVATION.shift)).to(b_gate.dtype)


@triton.jit
def _at_most(b, LIMIT: tl.constexpr):
    """A NaN stays one."""
    return tl.where(b > LIMIT, LIMIT, b)
