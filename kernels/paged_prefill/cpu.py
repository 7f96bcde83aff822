"""Prefill attention in vectorised torch: the chunk against itself, then earlier blocks piece by piece, merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_parts import join_null_logits, merge_parts, partial_attention
from ..dequant import dequant
from ..request_kv import token_positions
from ..request_pages import LayerPages, RequestPages

HISTORY_BLOCKS = 64  # earlier blocks gathered at a time, so that scratch stays bounded
WINDOW_QUERIES = 512  # of a chunk longer than its window, computed at a time over the keys that they see

Part = tuple[Tensor, Tensor]  # output [H, G, N, D] and log-sum-exps [H, G, N]


def paged_prefill(
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
    """Attention of a chunk of one request over itself and the request's earlier tokens, each over its ``window``.

    Shapes:  q [M, HQ, D], of the chunk's last M tokens;  k, v [N, H, D];  null_logits [HQ];
             returns [M, HQ, D] in q's dtype
    K and V are first rounded to the dense pages' dtype, so that chunking changes nothing.
    """
    dtype = pages.blocks.dtype
    heads = q.to(dtype).transpose(0, 1).unflatten(0, (k.shape[1], -1))  # [H, G, M, D]
    own_k, own_v = k.to(dtype).transpose(0, 1), v.to(dtype).transpose(0, 1)
    rule = _Rule(past.length + len(k) - len(q), scale, window, softcap)
    parts = [rule.attend_chunk(heads, own_k, own_v)]
    if window is None:
        parts += [rule.attend(heads, past_k, past_v) for past_k, past_v in _history(pages, past, dtype)]
    else:
        first, positions = 0, token_positions(past, pages.blocks.shape[3]) if past.length else None
        for past_k, past_v in _history(pages, past, dtype):
            assert positions is not None
            found = rule.attend_past(heads, past_k, past_v, positions[first : first + past_k.shape[1]])
            first += past_k.shape[1]
            parts += [found] if found else []
    out, lse = parts[0]
    if len(parts) > 1:
        outs, lses = map(torch.stack, zip(*parts, strict=True))
        out, lse = merge_parts(outs, lses), lses
    if null_logits is not None:
        lse = lse.logsumexp(0) if len(parts) > 1 else lse
        out = join_null_logits(out, lse, null_logits.view(*heads.shape[:2], 1))
    return out.flatten(0, 1).transpose(0, 1).to(q.dtype)


@dataclass(frozen=True)
class _Rule:
    """What each query of a chunk sees, the first one at position ``start``, and how scores become weights."""

    start: int
    scale: float
    window: int | None
    softcap: float | None

    def attend(
        self, heads: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Part:
        """heads [H, G, N, D] over k, v [H, n, D], which the query heads of a group share."""
        group = heads.shape[1]
        k, v = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
        return partial_attention(heads, k, v, scale=self.scale, mask=mask, is_causal=is_causal, softcap=self.softcap)

    def attend_chunk(self, heads: Tensor, k: Tensor, v: Tensor) -> Part:
        """The chunk over itself."""
        number = k.shape[1]
        if number > heads.shape[2]:
            queries = torch.arange(number - heads.shape[2], number)
            return self.attend(heads, k, v, mask=_mask(queries, torch.arange(number), self.window or number))
        if self.window is None or number <= self.window:
            return self.attend(heads, k, v, is_causal=True)
        parts, index = [], torch.arange(number)
        for first in range(0, number, WINDOW_QUERIES):
            rows = slice(first, first + WINDOW_QUERIES)
            keys = slice(max(0, first - self.window + 1), first + WINDOW_QUERIES)
            mask = _mask(index[rows], index[keys], self.window)
            parts.append(self.attend(heads[:, :, rows], k[:, keys], v[:, keys], mask=mask))
        out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
        return out, lse

    def attend_past(self, heads: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Part | None:
        """The chunk over earlier tokens at ``positions``; ``None`` if no query sees one."""
        assert self.window is not None
        number = heads.shape[2]
        seeing = min(number, int(positions.max()) + self.window - self.start)  # the first queries of the chunk
        if seeing <= 0:
            return None
        mask = _mask(torch.arange(self.start, self.start + seeing), positions, self.window)
        out, lse = self.attend(heads[:, :, :seeing], k, v, mask=mask)
        blind = number - seeing
        return F.pad(out, (0, 0, 0, blind)), F.pad(lse, (0, blind), value=float("-inf"))


def _mask(queries: Tensor, keys: Tensor, window: int) -> Tensor | None:
    """0 or -inf [1, 1, N, n] by the positions of queries and keys; ``None`` if every query sees every key."""
    hidden = (keys > queries[:, None]) | (keys <= queries[:, None] - window)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[None, None] if hidden.any() else None


def _history(pages: LayerPages, past: RequestPages, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V [H, n, D] of the earlier tokens, some blocks at a time, in the order of ``token_positions``."""
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
