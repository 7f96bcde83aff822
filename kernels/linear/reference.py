"""Plain torch, in float64 up to the last rounding."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear`` for a plain weight."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)
