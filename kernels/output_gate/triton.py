"""The gate of an attention's output in Triton: one program a tile of elements."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous

TILE = 1024
NUM_WARPS = 4  # 8 elements of each operand a thread: loads of 16 bytes


@triton.jit
def output_gate_kernel(x_ptr, gate_ptr, out_ptr, C: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """``out = x sigmoid(gate)``.

    Shapes:  x, gate, out [N, C]
    Grid:    (N * cdiv(C, TILE),)
    """
    let_next_start(OVERLAP)
    TILES: tl.constexpr = (C + TILE - 1) // TILE
    o_c = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    o_x, m_x = (tl.program_id(0) // TILES).to(tl.int64) * C + o_c, o_c < C
    wait_for_previous(OVERLAP)
    b_x = tl.load(x_ptr + o_x, mask=m_x, other=0.0)
    b_gate = tl.load(gate_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_part = (1.0 / (1.0 + tl.exp(-b_gate))).to(b_x.dtype).to(tl.float32)
    tl.store(out_ptr + o_x, (b_x.to(tl.float32) * b_part).to(b_x.dtype), mask=m_x)


def output_gate_triton(x: Tensor, gate: Tensor) -> Tensor:
    """See ``output_gate``."""
    assert x.is_contiguous() and gate.is_contiguous() and x.shape == gate.shape and x.dtype == gate.dtype
    num_rows, size = x.shape
    out = torch.empty_like(x)
    constexprs, num_warps = output_gate_variant(size)
    grid = (num_rows * triton.cdiv(size, TILE),)
    output_gate_kernel[grid](x, gate, out, **constexprs, num_warps=num_warps, **overlap_options(x.device), **FUSED)
    return out


def output_gate_variant(size: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows of ``size`` elements."""
    return {"C": size, "TILE": TILE}, NUM_WARPS
