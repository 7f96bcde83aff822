"""Attention over sealed blocks in vectorised torch, on the bare codes.

With K = min + code * step and V likewise, min and step act on queries, scores, probabilities or outputs, which are
small, and never on the elements of a page; the codes themselves are only converted to float32 for the product.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..layout import BlockLayout, UniformSide
from ..pages import code_planes, gather, read_meta, token_factors
from .one_group import Scales, attend_one_group, has_one_group, read_scales

Kept = dict[tuple[int, int], Scales]  # by layer and first block of a piece

PIECE_ELEMENTS = 2**20  # codes of K converted at a time: more leave the cache, fewer spend the time on calls


def block_attention(
    q: Tensor,
    memory: Tensor,
    where: Tensor | range,
    layout: BlockLayout,
    layer: int,
    scale: float,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of query i over all tokens of block i, and the log-sum-exp of its scores.

    Shapes:  q [n, H, G, D], or [1, H, G, D] for every block;  memory [M] uint8;  where: byte addresses of n slots,
             [n] int64, or in even steps, which are read in place;
             out [n, H, G, D] float32, lse [n, H, G] float32, in natural log
    ``kept`` may hold what an earlier call for the same blocks read of their metadata.
    Source:  logits_t = sum_d (q_d step_d) code_td + sum_d q_d min_d, and its counterparts for V and per-token K
    """
    k, v = layout.sides[2 * layer], layout.sides[2 * layer + 1]
    assert isinstance(k, UniformSide) and isinstance(v, UniformSide)
    q, offset, nbytes = q.float(), layout.offsets[2 * layer], k.nbytes + v.nbytes
    piece = max(1, PIECE_ELEMENTS // (k.num_kv_heads * k.num_tokens * k.head_dim))
    parts, kept = [], {} if kept is None else kept
    for start in range(0, len(where), piece):
        is_part = len(where) > piece
        some = where[start : start + piece] if is_part else where
        queries = q[start : start + piece] if is_part and len(q) > 1 else q
        page = _pages(memory, some, offset, nbytes)
        if has_one_group(k, v):
            if (layer, start) not in kept:
                kept[layer, start] = read_scales(page, k, v, scale)
            parts.append(attend_one_group(queries, page, kept[layer, start], k, v))
        else:
            parts.append(_attend(queries * scale, page, k, v))
    if len(parts) == 1:
        return parts[0]
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse


def _pages(memory: Tensor, where: Tensor | range, offset: int, nbytes: int) -> Tensor:
    """One layer's page of each block, [n, nbytes] uint8."""
    if isinstance(where, range):
        step = where.step if len(where) > 1 else nbytes
        return memory.as_strided((len(where), nbytes), (step, 1), where.start + offset)
    return gather(memory[offset:], where, nbytes)


def _attend(q: Tensor, page: Tensor, k: UniformSide, v: UniformSide) -> tuple[Tensor, Tensor]:
    """The same for scaled queries and pages [n, k.nbytes + v.nbytes] uint8."""
    scores = _product(q.expand(len(page), -1, -1, -1), page[:, : k.nbytes], k)
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum exp(score - largest score).
    lse = scores.amax(-1).sub_(weights.amax(-1).log_())
    return _product(weights, page[:, k.nbytes :], v), lse


def _product(x: Tensor, rows: Tensor, side: UniformSide) -> Tensor:
    """Queries times K, or probabilities times V: x [n, H, G, I] . side [n, H, J, I] -> [n, H, G, J].

    (min, range) either vary along I, for groups of J, and scale the inputs; or along J, for groups of I, and scale
    the outputs. The inputs of all groups [n, H, groups, G, I] are multiplied at once.
    """
    is_k = side.side == "k"
    low, span = read_meta(rows, side).float().unbind()
    factors = token_factors(side.bits, side.num_tokens)
    inputs = (x if is_k else x * factors).unsqueeze(2)
    if (side.axis == "channel") == is_k:
        bias = x @ low.mT
        if side.num_groups > 1:
            bias = bias.repeat_interleave(side.group, -1)[..., : side.num_tokens if is_k else side.head_dim]
        out = _diagonal(_dot(inputs * span.unsqueeze(3), rows, side), side.group)
    else:
        member = _members(x.shape[-1], side.group)
        bias = x @ member.mT @ low
        out = (_dot(inputs * member.unsqueeze(1), rows, side) * span.unsqueeze(3)).sum(2)
    return torch.addcmul(bias, out, factors) if is_k else out.add_(bias)


def _dot(x: Tensor, rows: Tensor, side: UniformSide) -> Tensor:
    """x [n, H, groups, G, I] . masked codes [n, H, J, I] -> [n, H, groups, G, J]"""
    n, heads, groups, queries, size = x.shape
    codes = code_planes(rows, side).float()
    num_planes, inputs = codes.shape[2], x.view(n * heads, groups * queries, size)
    if side.side == "k" or num_planes == 1:
        out = torch.bmm(inputs, codes.view(n * heads, -1, size).mT)
    else:
        # A product a plane: joining the planes of V would cost more than adding up their outputs.
        inputs = inputs.view(n * heads, groups * queries, num_planes, -1).transpose(1, 2)
        out = torch.matmul(inputs, codes.flatten(0, 1).mT).sum(1)
    return out.view(n, heads, groups, queries, -1)


def _diagonal(products: Tensor, group: int) -> Tensor:
    """Of products [n, H, groups, G, J] those of each group's inputs with its own outputs, [n, H, G, J]."""
    if products.shape[2] == 1:
        return products.squeeze(2)
    return torch.cat([run[:, :, g] for g, run in enumerate(products.split(group, -1))], -1)


@lru_cache
def _members(size: int, group: int) -> Tensor:
    """1 where an input is in a group, else 0: [groups, I] float32."""
    groups = torch.arange(-(-size // group))
    return (torch.arange(size) // group == groups[:, None]).float()
