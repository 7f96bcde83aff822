"""Decode attention, plainly: read one request's tokens, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_reference import softmax_weights
from ..request_kv import request_tokens, token_positions
from ..request_pages import LayerPages, RequestPages


def paged_decode_reference(
    q: Tensor,
    pages: LayerPages,
    requests: list[RequestPages],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    null_logits: Tensor | None = None,
) -> Tensor:
    """out[b, h] = softmax(scale * q[b, h] . K_b) V_b over the tokens of request b; see ``softmax_weights``.

    Shapes:  q [B, HQ, D];  null_logits [HQ];  returns [B, HQ, D] float32
    Source:  scaled dot-product attention, grouped queries
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for b, request in enumerate(requests):
        k, v = request_tokens(pages, request)
        group = q.shape[1] // k.shape[0]
        scores = scale * torch.einsum("hd,htd->ht", q[b].float(), k.repeat_interleave(group, dim=0))
        positions = None if window is None else token_positions(request, pages.blocks.shape[3]).to(q.device)
        weights = softmax_weights(
            scores[:, None], positions=positions, window=window, softcap=softcap, null_logits=null_logits
        )[:, 0]
        out[b] = torch.einsum("ht,htd->hd", weights, v.repeat_interleave(group, dim=0))
    return out
