"""Prefill attention in vectorised torch: the chunk against itself, then earlier blocks piece by piece, merged."""

from __future__ import annotations

import torch
from torch import Tensor

from ..partial import merge_parts, partial_attention

HISTORY_BLOCKS = 64  # earlier blocks gathered at a time, so that scratch stays bounded


def paged_prefill(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, block_table: Tensor, start: int, scale: float
) -> Tensor:
    """Attention of a chunk of one request, whose first token has position ``start``.

    Shapes:  q [N, HQ, D];  k, v [N, H, D];  pages [S, 2, H, T, D];  block_table [ceil(start / T)] int64 slot numbers
    Returns [N, HQ, D] in q's dtype. K and V are first rounded to the pages' dtype, so that chunking changes nothing.
    """
    num_kv_heads, num_tokens = k.shape[1], pages.shape[3]
    dtype = pages.dtype
    heads = q.to(dtype).transpose(0, 1).unflatten(0, (num_kv_heads, -1))  # [H, G, N, D]
    group = heads.shape[1]
    out, lse = partial_attention(
        heads, _spread(k.to(dtype), group), _spread(v.to(dtype), group), scale=scale, is_causal=True
    )
    parts = [(out, lse)]
    for first in range(0, len(block_table), HISTORY_BLOCKS):
        kv = pages.index_select(0, block_table[first : first + HISTORY_BLOCKS])  # [n, 2, H, T, D]
        kv = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : start - first * num_tokens]
        past_k, past_v = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in kv)
        parts.append(partial_attention(heads, past_k, past_v, scale=scale))
    if len(parts) > 1:
        out = merge_parts(torch.stack([o for o, _ in parts], 1), torch.stack([s for _, s in parts], 1))
    return out.flatten(0, 1).transpose(0, 1).to(q.dtype)


def _spread(x: Tensor, group: int) -> Tensor:
    """[N, H, D] as [H, group, N, D], the query heads of a group sharing memory."""
    return x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
