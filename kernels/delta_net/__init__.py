"""Gated delta-net: a layer whose memory of a request is a state of fixed size, written by a delta rule.

Of each token q, k and v pass a short causal convolution; the state of each value head is decayed, corrected under k and
read with q. A step's forms are in ``cpu.py`` and, over states in a byte arena, in ``triton.py``; the planner of each
device calls its own.
Source: Gated Delta Networks (arXiv 2412.06464)
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .formats import STATE_FORMATS, StateFormat
from .state import DeltaWeights, StateSpec, StateViews
from .step_down import narrow_states


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight * silu(z)``: float32 inside, cast before the weight, like Hugging Face.

    Shapes:  x, z [N, H, D], rows of D contiguous;  weight [D];  returns [N, H, D], contiguous, in the dtype of x
    """
    if x.is_cuda and not x.requires_grad:
        from .triton import gated_rms_norm_triton

        out = torch.empty_like(x)
        gated_rms_norm_triton(x, z, weight, eps, out)
        return out
    return reference.gated_rms_norm(x, z, weight, eps)


__all__ = ["STATE_FORMATS", "DeltaWeights", "StateFormat", "StateSpec", "StateViews", "gated_rms_norm", "narrow_states"]
