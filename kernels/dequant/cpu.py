"""Dequantization in vectorised torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import DenseSide, Side
from ..pages import gather, read_codes, read_dense, read_meta, spread


def dequant_cpu(memory: Tensor, addresses: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """See ``dequant``."""
    rows = gather(memory, addresses, side.nbytes)
    if isinstance(side, DenseSide):
        return read_dense(rows, side).to(dtype)
    low, span = read_meta(rows, side).float()
    # Attention wants channels to be contiguous, and bytes are cheaper to transpose than floats.
    out = read_codes(rows, side).contiguous().float()
    out *= spread(span / side.max_code, side)
    out += spread(low, side)
    return out.to(dtype)
