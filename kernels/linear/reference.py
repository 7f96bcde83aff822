"""Plain torch: the definition, and the back end of every weight that is not packed (a GPU's, for one)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear`` for a plain weight."""
    out = F.linear(x, weight, bias)
    return out if residual is None else out.add_(residual)
