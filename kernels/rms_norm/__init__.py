"""RMSNorm over the last dimension, alone or fused with the residual add before it in a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..linear.split_sums import SplitSums
from . import cpu
from .cpu import scaled_rms_norm

if TYPE_CHECKING:
    from ..linear.float8_rows import Float8Rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight``: float32 inside, cast back before the weight, like Hugging Face.

    Shapes:  x [N, E], contiguous on a GPU;  weight [E];  returns [N, E]; one dtype
    Torch's own operators run where gradients pass through ``x``. Otherwise on a GPU ``weight`` is read while the kernel
    before may still run: that kernel must not write it.
    """
    if x.is_cuda and not x.requires_grad:
        from .triton import rms_norm_triton

        return rms_norm_triton(x, None, weight, eps)
    return cpu.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor | SplitSums, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x``, rounded to the dtype, and then ``rms_norm`` of the sum.

    On a GPU ``x`` may be a product in splits, which gives the bits of the product that it stands for.
    Shapes:  x, residual [N, E], contiguous on a GPU;  weight [E];  returns [N, E]; one dtype
    """
    if residual.is_cuda:
        from .triton import rms_norm_triton

        return rms_norm_triton(x, residual, weight, eps)
    assert isinstance(x, Tensor)
    return cpu.rms_norm(residual.add_(x), weight, eps)


def rms_norm_rows(x: Tensor | SplitSums, residual: Tensor | None, weight: Tensor, eps: float) -> Float8Rows:
    """``rms_norm``, or with a residual ``add_rms_norm``, in 8-bit floats on a GPU: the bits of ``quantize_rows``."""
    from .triton import rms_norm_float8

    return rms_norm_float8(x, residual, weight, eps)


__all__ = ["add_rms_norm", "rms_norm", "rms_norm_rows", "scaled_rms_norm"]
