"""Attention over sealed blocks, plainly: dequantize, then softmax in float32."""

from __future__ import annotations

from torch import Tensor

from ..dequant import dequant_reference
from ..formats import PageLayout


def block_attention_reference(
    q: Tensor, memory: Tensor, addresses: Tensor, page: PageLayout, scale: float, banks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same contract as ``block_attention``."""
    k, v = dequant_reference(memory, addresses, page, banks)
    scores = scale * q.float() @ k.mT
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
