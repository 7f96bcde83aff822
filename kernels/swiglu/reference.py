"""Plain torch: the definition, and the back end on the CPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """Same contract as ``qkv_engine.kernels.swiglu.swiglu``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
