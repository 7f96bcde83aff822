"""Prefill attention, plainly: all keys up to each query's position, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, block_table: list[int], start: int, scale: float
) -> Tensor:
    """Token i of the chunk sees tokens 0 .. start + i of its request.

    Shapes:  q [N, HQ, D];  k, v [N, H, D];  pages [S, 2, H, T, D];  returns [N, HQ, D] float32
    Source:  causal scaled dot-product attention, grouped queries
    """
    history = pages[block_table].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :start]  # [2, H, start, D]
    group = q.shape[1] // k.shape[1]
    keys = torch.cat((history[0], k.float().transpose(0, 1)), dim=1).repeat_interleave(group, dim=0)
    values = torch.cat((history[1], v.float().transpose(0, 1)), dim=1).repeat_interleave(group, dim=0)
    scores = scale * torch.einsum("nhd,htd->hnt", q.float(), keys)
    position = torch.arange(start, start + len(q), device=q.device)
    hidden = torch.arange(start + len(q), device=q.device) > position[:, None]
    return torch.einsum("hnt,htd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
