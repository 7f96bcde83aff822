"""Attention over sealed blocks, plainly: dequantize, then softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dequant import dequant_reference
from ..formats import PageLayout


def block_attention_reference(
    q: Tensor,
    memory: Tensor,
    addresses: Tensor,
    page: PageLayout,
    scale: float,
    banks: Tensor | None = None,
    *,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Same contract as ``block_attention``."""
    k, v = dequant_reference(memory, addresses, page, banks)
    scores = scale * q.float() @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores.masked_fill(
            torch.arange(k.shape[2], device=k.device) < hidden[:, None, None, None], float("-inf")
        )
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
