"""Prefill attention in vectorised torch: the chunk against itself, then earlier blocks piece by piece, merged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention_parts import merge_parts, partial_attention
from ..dequant import dequant
from ..request_pages import LayerPages, RequestPages

HISTORY_BLOCKS = 64  # earlier blocks gathered at a time, so that scratch stays bounded


def paged_prefill(q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, past: RequestPages, scale: float) -> Tensor:
    """Attention of a chunk of one request over itself and the request's earlier tokens.

    Shapes:  q [N, HQ, D];  k, v [N, H, D];  returns [N, HQ, D] in q's dtype
    K and V are first rounded to the dense pages' dtype, so that chunking changes nothing.
    """
    dtype = pages.blocks.dtype
    heads = q.to(dtype).transpose(0, 1).unflatten(0, (k.shape[1], -1))  # [H, G, N, D]
    own_k, own_v = k.to(dtype).transpose(0, 1), v.to(dtype).transpose(0, 1)
    parts = [_attend(heads, own_k, own_v, scale, is_causal=True)]
    parts += [_attend(heads, past_k, past_v, scale) for past_k, past_v in _history(pages, past, dtype)]
    out = parts[0][0]
    if len(parts) > 1:
        out = merge_parts(*map(torch.stack, zip(*parts, strict=True)))
    return out.flatten(0, 1).transpose(0, 1).to(q.dtype)


def _attend(heads: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """heads [H, G, N, D] over k, v [H, n, D], which the query heads of a group share."""
    group = heads.shape[1]
    k, v = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    return partial_attention(heads, k, v, scale=scale, is_causal=is_causal)


def _history(pages: LayerPages, past: RequestPages, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V [H, n, D] of the earlier tokens, some blocks at a time."""
    for kv, where in ((pages.sinks, past.sink), (pages.blocks, past.open)):
        if where is not None and kv is not None:
            slot, valid = where
            yield kv[slot, 0, :, :valid], kv[slot, 1, :, :valid]
    for some in _pieces(past.full):
        kv = pages.blocks.index_select(0, torch.tensor(some))  # [n, 2, H, T, D]
        k, v = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)
        yield k, v
    banks = None if past.bank is None else torch.tensor([past.bank])
    for rung, addresses in past.sealed.items():
        for some in _pieces(addresses):
            at = torch.tensor(some)
            sides = dequant(pages.memory, at, pages.layouts[rung].pages[pages.layer], dtype, banks)
            k, v = (side.transpose(0, 1).flatten(1, 2) for side in sides)
            yield k, v


def _pieces(members: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(members), HISTORY_BLOCKS):
        yield members[first : first + HISTORY_BLOCKS]
