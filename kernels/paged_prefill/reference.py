"""Prefill attention, plainly: all keys up to each query's position, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..request_kv import request_tokens
from ..request_pages import LayerPages, RequestPages


def paged_prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, past: RequestPages, scale: float
) -> Tensor:
    """Token i of the chunk sees its request's earlier tokens, ``past``, and tokens 0 .. i of the chunk.

    Shapes:  q [N, HQ, D];  k, v [N, H, D];  returns [N, HQ, D] float32
    Source:  causal scaled dot-product attention, grouped queries
    """
    keys, values = k.float().transpose(0, 1), v.float().transpose(0, 1)
    if past.length:
        past_k, past_v = request_tokens(pages, past)
        keys, values = torch.cat((past_k, keys), dim=1), torch.cat((past_v, values), dim=1)
    group = q.shape[1] // k.shape[1]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = scale * torch.einsum("nhd,htd->hnt", q.float(), keys)
    position = torch.arange(past.length, past.length + len(q), device=q.device)
    hidden = torch.arange(past.length + len(q), device=q.device) > position[:, None]
    return torch.einsum("hnt,htd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
