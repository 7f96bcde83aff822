"""SwiGLU's gate in Triton: one program a tile of a row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous

TILE = 1024
NUM_WARPS = 4  # 8 elements of each operand a thread: loads of 16 bytes


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, INNER: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """``out = silu(gate) * up``.

    Shapes:  gate_up [N, 2 I];  out [N, I]
    Grid:    (N * cdiv(I, TILE),)
    """
    let_next_start(OVERLAP)
    TILES: tl.constexpr = (INNER + TILE - 1) // TILE
    i_n = (tl.program_id(0) // TILES).to(tl.int64)
    o_i = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    m_i = o_i < INNER
    p_gate = gate_up_ptr + i_n * (2 * INNER) + o_i
    wait_for_previous(OVERLAP)
    b_gate = tl.load(p_gate, mask=m_i, other=0.0)
    b_up = tl.load(p_gate + INNER, mask=m_i, other=0.0)
    b_wide = b_gate.to(tl.float32)
    b_silu = (b_wide / (1.0 + tl.exp(-b_wide))).to(b_gate.dtype).to(tl.float32)
    tl.store(out_ptr + i_n * INNER + o_i, (b_silu * b_up.to(tl.float32)).to(b_gate.dtype), mask=m_i)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """See ``swiglu``."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, inner)
    constexprs, num_warps = swiglu_variant(inner)
    grid = (num_rows * triton.cdiv(inner, TILE),)
    swiglu_kernel[grid](gate_up, out, **constexprs, num_warps=num_warps, **overlap_options(gate_up.device), **FUSED)
    return out


def swiglu_variant(inner: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``inner`` results."""
    return {"INNER": inner, "TILE": TILE}, NUM_WARPS
