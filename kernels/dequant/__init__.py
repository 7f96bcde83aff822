"""Dequantization on the CPU: page sides as plain tensors, for prefill over sealed blocks, references and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import PageLayout
from ..formats.rows import page_rows


def dequant(
    memory: Tensor, addresses: Tensor, page: PageLayout, dtype: torch.dtype, banks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K and V of one layer of the blocks at ``addresses``.

    Shapes:  memory [M] uint8;  addresses [n] int64, byte addresses of slots;  banks [n] or [1] int64, those of their
             requests' banks, for pages with patterns;  returns [n, H, T, D] ``dtype`` each
    """
    k, v = page_rows(memory, addresses, page, banks)
    return page.k.family.cpu.dequantize(k, page.k, dtype), page.v.family.cpu.dequantize(v, page.v, dtype)


def dequant_reference(
    memory: Tensor, addresses: Tensor, page: PageLayout, banks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dequant`` in float32 by the plain references of the families."""
    k, v = page_rows(memory, addresses, page, banks)
    return page.k.family.dequantize(k, page.k), page.v.family.dequantize(v, page.v)


__all__ = ["dequant", "dequant_reference"]
