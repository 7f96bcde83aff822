"""Plain torch: Hugging Face's ``LlamaRMSNorm``."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as ``qkv_engine.kernels.rms_norm.rms_norm``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as ``qkv_engine.kernels.rms_norm.add_rms_norm``."""
    return rms_norm(residual.add_(x), weight, eps)
