"""Dequantization, plainly: x = min + code * range / (2^bits - 1) in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import DenseSide, Side
from ..pages import read_codes, read_dense, read_meta, spread


def dequant_reference(memory: Tensor, addresses: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """The same as ``dequant``, one page side at a time."""
    pages = []
    for address in addresses.tolist():
        rows = memory[address : address + side.nbytes].unsqueeze(0)
        if isinstance(side, DenseSide):
            pages.append(read_dense(rows, side).to(dtype))
            continue
        low, span = read_meta(rows, side).float()
        codes = read_codes(rows, side).float()
        pages.append((spread(low, side) + codes * spread(span / side.max_code, side)).to(dtype))
    return torch.cat(pages)
