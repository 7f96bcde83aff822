"""Prefill attention, plainly: all keys up to each query's position, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_reference import softmax_weights
from ..request_kv import request_tokens, token_positions
from ..request_pages import LayerPages, RequestPages


def paged_prefill_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: LayerPages,
    past: RequestPages,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    null_logits: Tensor | None = None,
) -> Tensor:
    """Token i of the chunk sees its request's earlier tokens, ``past``, and tokens 0 .. i; see ``softmax_weights``.

    Shapes:  q [N, HQ, D];  k, v [N, H, D];  null_logits [HQ];  returns [N, HQ, D] float32
    Source:  causal scaled dot-product attention, grouped queries
    """
    keys, values = k.float().transpose(0, 1), v.float().transpose(0, 1)
    positions = torch.arange(past.length + len(q), device=q.device)
    if past.length:
        past_k, past_v = request_tokens(pages, past)
        keys, values = torch.cat((past_k, keys), dim=1), torch.cat((past_v, values), dim=1)
        if window is not None:
            positions[: past.length] = token_positions(past, pages.blocks.shape[3])
    group = q.shape[1] // k.shape[1]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = scale * torch.einsum("nhd,htd->hnt", q.float(), keys)
    weights = softmax_weights(scores, positions=positions, window=window, softcap=softcap, null_logits=null_logits)
    return torch.einsum("hnt,htd->nhd", weights, values)
