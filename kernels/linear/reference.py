"""Plain torch, in float64 up to the last rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .split_sums import SplitSums


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear`` for a plain weight."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def add_sums(splits: SplitSums, dtype: torch.dtype) -> Tensor:
    """The product [M, N] that ``splits`` stand for, in the order in which kernels add them up."""
    sums, bias = splits
    out = torch.zeros_like(sums[0]) if bias is None else torch.zeros_like(sums[0]) + bias.float()
    for split in sums:
        out += split
    return out.to(dtype)
