"""Attention over sealed blocks whose K has one group of tokens a channel and whose V has one group of channels a token.

Then nothing of K's (min, range) depends on the token and nothing of V's on the channel: K's min adds the same to all
scores of a block, which the softmax ignores, and V's adds one number to all outputs. Half the operators of the general
way are left, and on few blocks their number is what costs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import UniformSide
from ..pages import code_planes, meta_tile, token_factors


class Scales(NamedTuple):
    """(min, range) of pages in float32: of K times the scale of the scores, [n, H, 1, D]; of V [n, H, 1, T], the range
    times the factors of its planes.
    """

    k_min: Tensor
    k_range: Tensor
    v_min: Tensor
    v_range: Tensor


def has_one_group(k: UniformSide, v: UniformSide) -> bool:
    """Whether ``attend_one_group`` serves the sides of a page."""
    return (k.axis, v.axis, k.num_groups, v.num_groups) == ("channel", "token", 1, 1)


def read_scales(page: Tensor, k: UniformSide, v: UniformSide, scale: float) -> Scales:
    """page [n, k.nbytes + v.nbytes] uint8"""
    k_min, k_range = meta_tile(page, k).float().mul_(scale).unbind()
    v_min, v_range = meta_tile(page, v, k.nbytes).flatten(-2).float().unbind()
    return Scales(k_min, k_range, v_min, v_range * token_factors(v.bits, v.num_tokens))


def attend_one_group(q: Tensor, page: Tensor, scales: Scales, k: UniformSide, v: UniformSide) -> tuple[Tensor, Tensor]:
    """See ``block_attention``; q [n or 1, H, G, D] float32, page [n, k.nbytes + v.nbytes] uint8."""
    n, heads, queries, num_tokens = len(page), k.num_kv_heads, q.shape[2], k.num_tokens
    rows = n * heads
    codes = code_planes(page, k).float()
    scores = torch.bmm((q * scales.k_range).view(rows, queries, -1), codes.view(rows, num_tokens, -1).mT)
    scores = scores.view(n, heads, queries, num_tokens).mul_(token_factors(k.bits, num_tokens))
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum exp(score - largest score).
    lse = scores.amax(-1).sub_(weights.amax(-1).log_()).add_((q * scales.k_min).sum(-1))

    codes = code_planes(page, v, k.nbytes).float()
    num_planes = codes.shape[2]
    inputs = (weights * scales.v_range).view(rows, queries, num_planes, -1)
    inputs = inputs.transpose(1, 2).reshape(rows * num_planes, queries, -1)
    out = torch.bmm(inputs, codes.view(rows * num_planes, v.head_dim, -1).mT)
    out = out.view(n, heads, num_planes, queries, -1).sum(2)
    return out.add_((weights * scales.v_min).sum(-1, True)), lse
