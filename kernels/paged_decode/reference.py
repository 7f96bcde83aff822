"""Decode attention, plainly: read one request's tokens, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..request_kv import request_tokens
from ..request_pages import LayerPages, RequestPages


def paged_decode_reference(q: Tensor, pages: LayerPages, requests: list[RequestPages], scale: float) -> Tensor:
    """out[b, h] = softmax(scale * q[b, h] . K_b) V_b over the tokens of request b.

    Shapes:  q [B, HQ, D];  returns [B, HQ, D] float32
    Source:  scaled dot-product attention, grouped queries
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for b, request in enumerate(requests):
        k, v = request_tokens(pages, request)
        group = q.shape[1] // k.shape[0]
        scores = scale * torch.einsum("hd,htd->ht", q[b].float(), k.repeat_interleave(group, dim=0))
        out[b] = torch.einsum("ht,htd->hd", scores.softmax(-1), v.repeat_interleave(group, dim=0))
    return out
