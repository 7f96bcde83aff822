"""Decode attention, plainly: gather one request's tokens, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_decode_reference(
    q: Tensor, pages: Tensor, block_tables: list[list[int]], lengths: list[int], scale: float
) -> Tensor:
    """out[b, h] = softmax(scale * q[b, h] . K_b) V_b over the first ``lengths[b]`` tokens of request b.

    Shapes:  q [B, HQ, D];  pages [S, 2, H, T, D] (slot, K or V);  returns [B, HQ, D] float32
    Source:  scaled dot-product attention, grouped queries
    """
    batch, num_heads, head_dim = q.shape
    group = num_heads // pages.shape[2]
    out = torch.empty(batch, num_heads, head_dim, dtype=torch.float32, device=q.device)
    for b in range(batch):
        tokens = pages[block_tables[b]].float().permute(1, 2, 0, 3, 4)  # [2, H, blocks, T, D]
        k, v = tokens.flatten(2, 3)[:, :, : lengths[b]].repeat_interleave(group, dim=1)
        scores = scale * torch.einsum("hd,htd->ht", q[b].float(), k)
        out[b] = torch.einsum("ht,htd->hd", scores.softmax(-1), v)
    return out
