"""Attention over sealed blocks, plainly: dequantize, then softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dequant.reference import dequant_reference
from ..layout import BlockLayout


def block_attention_reference(
    q: Tensor, memory: Tensor, addresses: Tensor, layout: BlockLayout, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The same as ``block_attention``."""
    k, v = (
        dequant_reference(memory, addresses + layout.offsets[i], layout.sides[i], torch.float32)
        for i in (2 * layer, 2 * layer + 1)
    )
    scores = scale * q.float() @ k.mT
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
