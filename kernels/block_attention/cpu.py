"""Attention over sealed blocks in vectorised torch, on the bare codes where the format family allows it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_parts import soft_capped
from ..formats import PageLayout
from ..formats.rows import page_rows

PIECE_ELEMENTS = 2**22  # codes of K attended in one call; more make larger copies and scores, some MiB here


def block_attention(
    q: Tensor,
    memory: Tensor,
    where: Tensor | range,
    page: PageLayout,
    scale: float,
    banks: Tensor | None = None,
    *,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of query i over all tokens of block i, and the log-sum-exp of its scores.

    Shapes:  q [n, H, G, D], or [1, H, G, D] for every block;  memory [M] uint8;  where: byte addresses of n slots,
             [n] int64, or in even steps, which are read in place;  banks [n] or [1] int64, byte addresses of the
             banks of the blocks' requests, for pages with patterns;  hidden [n], the first tokens of each block that
             its query does not see, fewer than all;
             out [n, H, G, D] float32, lse [n, H, G] float32, in natural log
    ``softcap`` c makes s of a score c tanh(s / c).
    """
    q, shape = q.float() * scale, page.k.shape
    size = max(1, PIECE_ELEMENTS // (shape.num_kv_heads * shape.num_tokens * shape.head_dim))
    if len(where) <= size:
        return _attend(q, memory, where, page, banks, hidden, softcap)
    parts = []
    for i in range(0, len(where), size):
        some, mine = (x if x is None or len(x) == 1 else x[i : i + size] for x in (q, banks))
        assert some is not None
        cut = None if hidden is None else hidden[i : i + size]
        parts.append(_attend(some, memory, where[i : i + size], page, mine, cut, softcap))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse


def _attend(
    q: Tensor,
    memory: Tensor,
    where: Tensor | range,
    page: PageLayout,
    banks: Tensor | None,
    hidden: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """``block_attention`` for queries that are scaled already."""
    k, v = page_rows(memory, where, page, banks)
    scores = page.k.family.cpu.scores(q.expand(len(where), -1, -1, -1), k, page.k)
    if softcap is not None:
        scores = soft_capped(scores, softcap)
    if hidden is not None:
        scores = scores.masked_fill(torch.arange(scores.shape[-1]) < hidden[:, None, None, None], float("-inf"))
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum exp(score - largest score).
    lse = scores.amax(-1).sub_(weights.amax(-1).log_())
    return page.v.family.cpu.values(weights, v, page.v), lse
