"""Sign sides, plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.kernels.formats.family import LIMIT, Side, SideBytes

from .layout import GROUP, SignSide


def quantize(x: Tensor, side: SignSide, bank: Tensor | None = None) -> SideBytes:
    """The bytes of ``x`` [n, H, T, D] as sides; non-finite values count as 0."""
    x = torch.where(x.isfinite(), x, 0).float().clamp(-LIMIT, LIMIT)
    bits = (x >= 0).unflatten(-1, (-1, GROUP)).int() << torch.arange(GROUP)
    sums = x.abs()
    for _ in range(3):  # neighbours first, so that other back ends round as this one does
        sums = sums[..., 0::2] + sums[..., 1::2]
    means = (sums / GROUP).half()
    return SideBytes(bits.sum(-1).to(torch.uint8).flatten(1), means.flatten(1).view(torch.uint8))


def dequantize(rows: SideBytes, side: SignSide) -> Tensor:
    """Elements [n, H, T, D] float32."""
    shape = (-1, side.shape.num_kv_heads, side.shape.num_tokens, side.shape.head_dim // GROUP, 1)
    means = rows.meta.view(torch.float16).float().view(shape)
    is_positive = rows.codes.view(shape) >> torch.arange(GROUP) & 1
    return torch.where(is_positive.bool(), means, -means).flatten(-2)


def demote(rows: SideBytes, old: Side, new: SignSide) -> SideBytes:
    """Never called: sign sides are sealed from dense ones alone."""
    raise ValueError(f"no demotion leads to {new}")
