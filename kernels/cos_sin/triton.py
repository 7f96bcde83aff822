"""Cosines and sines of positions in Triton: one launch in place of torch's three or five."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import UNFUSED


@triton.jit
def cos_sin_kernel(
    positions_ptr, frequencies_ptr, scale_ptr, cos_ptr, sin_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The functions are CUDA's own, exact to an ulp or two at any angle, which is not to be fused with their argument.

    Shapes:  positions [N];  frequencies, scale [D], or no scale;  cos, sin [N, D]
    Grid:    (N,)
    """
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_angle = tl.load(positions_ptr + i_n).to(tl.float32) * tl.load(frequencies_ptr + o_d, mask=m_d, other=0.0)
    b_cos, b_sin = tl.cos(b_angle), tl.sin(b_angle)
    if scale_ptr is not None:
        b_scale = tl.load(scale_ptr + o_d, mask=m_d, other=0.0)
        b_cos, b_sin = b_cos * b_scale, b_sin * b_scale
    tl.store(cos_ptr + i_n * D + o_d, b_cos, mask=m_d)
    tl.store(sin_ptr + i_n * D + o_d, b_sin, mask=m_d)


def cos_sin_triton(positions: Tensor, frequencies: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``cos_sin``."""
    assert positions.is_contiguous() and frequencies.is_contiguous() and (scale is None or scale.is_contiguous())
    number, size = len(positions), len(frequencies)
    cos, sin = torch.empty(2, number, 1, size, dtype=torch.float32, device=positions.device)
    constexprs, num_warps = cos_sin_variant(size)
    cos_sin_kernel[(number,)](positions, frequencies, scale, cos, sin, **constexprs, num_warps=num_warps, **UNFUSED)
    return cos, sin


def cos_sin_variant(size: int) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for heads of ``size`` channels."""
    block = triton.next_power_of_2(size)
    return {"D": size, "BLOCK_D": block}, max(1, min(4, block // 64))
