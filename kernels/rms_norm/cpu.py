"""RMSNorm in few torch operators."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., E]; ``weight`` broadcasts with it."""
    size = x.shape[-1]
    if x.is_cpu and x.dtype is torch.float32:
        # rms * sqrt(size) = hypot(|x|, sqrt(size * eps)): 4 operators where rms_norm runs 11 on the CPU.
        zero, floor = _constants(size, eps)
        norm = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), floor)
        return torch.addcdiv(zero, x, norm, value=math.sqrt(size)).mul_(weight)
    return F.rms_norm(x, (size,), None, eps).mul_(weight)


@cache
def _constants(size: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.zeros((), device="cpu"), torch.full((), math.sqrt(size * eps), device="cpu")
