"""The sigmoid gate in Triton: one program a tile of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous

TILE = 1024
NUM_WARPS = 4  # 8 elements of each operand a thread: loads of 16 bytes


@triton.jit
def sigmoid_gate_kernel(
    x_ptr, gate_ptr, out_ptr, stride_gate,
    INNER: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x * sigmoid(gate)``.

    Shapes:  x and out [N, I];  gate [N, I], rows ``stride_gate`` apart
    Grid:    (N * cdiv(I, TILE),)
    """
    let_next_start(OVERLAP)
    TILES: tl.constexpr = (INNER + TILE - 1) // TILE
    o_i = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    m_i = o_i < INNER
    i_n = (tl.program_id(0) // TILES).to(tl.int64)
    b_gate = tl.load(gate_ptr + i_n * stride_gate + o_i, mask=m_i, other=0.0)
    b_share = (1.0 / (1.0 + tl.exp(-b_gate.to(tl.float32)))).to(b_gate.dtype)
    o = i_n * INNER + o_i
    wait_for_previous(OVERLAP)
    b_x = tl.load(x_ptr + o, mask=m_i, other=0.0)
    tl.store(out_ptr + o, (b_x.to(tl.float32) * b_share.to(tl.float32)).to(b_x.dtype), mask=m_i)


def sigmoid_gate_triton(x: Tensor, gate: Tensor) -> Tensor:
    """See ``sigmoid_gate``."""
    assert x.is_contiguous() and gate.stride(1) == 1 and x.shape == gate.shape
    num_rows, inner = x.shape
    out = torch.empty_like(x)
    options = {"INNER": inner, "TILE": TILE, "num_warps": NUM_WARPS, **overlap_options(x.device)}
    sigmoid_gate_kernel[(num_rows * triton.cdiv(inner, TILE),)](x, gate, out, gate.stride(0), **options, **FUSED)
    return out
