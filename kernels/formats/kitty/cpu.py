"""Kitty sides in vectorised torch: sealing, demotion, and attention on the bare codes of both sets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import CpuOps, SideBytes
from ..uniform import UniformSide
from ..uniform.codes import code_planes, pack, token_factors
from ..uniform.cpu import seal as seal_uniform
from ..uniform.reference import meta_tile, tops
from ..uniform.reference import read_codes as read_uniform
from .layout import KittySide, Ranking
from .reference import (
    choose,
    code_sets,
    hash_channels,
    head_metas,
    numbers,
    pairs,
    read_codes,
)


def seal(dense: Tensor, out: SideBytes, side: KittySide) -> bool:
    """Codes and metadata of ``dense`` [n, H, T, D], by way of 8 bits; whether all values are finite."""
    wide = side.uniform(8)
    rows = SideBytes(*(out.codes.new_empty(len(dense), size) for size in (wide.codes_nbytes, wide.meta_nbytes)))
    finite = seal_uniform(dense, rows, wide)
    demote(rows, out, wide, side)
    return finite


def demote(rows: SideBytes, out: SideBytes, old: UniformSide, new: KittySide) -> None:
    """The bytes of uniform sides of 8 or 4 bits as Kitty sides."""
    codes = read_uniform(rows, old)
    if old.bits == 8:
        codes = codes.to(torch.int16).add_(9).mul_(15).bitwise_right_shift_(8).to(torch.uint8)  # see ``codes.narrow``
    meta = meta_tile(rows, old).squeeze(3)
    low, span = meta.float().unbind()
    channels, is_boosted = choose(_scores(codes, low, span, new.ranking), new.boosted)
    _store_codes(codes, channels, is_boosted, out, new)
    _store_meta(meta, channels, is_boosted, out, new)


def dequantize(rows: SideBytes, side: KittySide, dtype: torch.dtype) -> Tensor:
    """Elements [n, H, T, D]."""
    low, span = pairs(rows, side).float().split(1, 2)
    return read_codes(rows, side).float().mul_(_steps(span)).add_(low).to(dtype)


def scores(q: Tensor, rows: SideBytes, side: KittySide) -> Tensor:
    """logits_t = sum_d (q_d step_d) (low_td + 4 high_td) + sum_d q_d min_d."""
    n, heads, queries, _ = q.shape
    low, span = pairs(rows, side).float().split(1, 2)
    inputs = q * _steps(span).mul_(3)  # the factors of tokens have the 3 levels of 2 bits
    boosted = inputs.gather(3, numbers(rows, side).long().unsqueeze(2).expand(-1, -1, queries, -1))
    base, high = (code_planes(part, 2, "k", side.shape.num_tokens).float() for part in code_sets(rows, side))
    out = torch.bmm(inputs.flatten(0, 1), base.flatten(2, 3).flatten(0, 1).mT)
    out.baddbmm_(boosted.flatten(0, 1), high.flatten(2, 3).flatten(0, 1).mT, alpha=4)
    out = out.view(n, heads, queries, -1).mul_(token_factors(2, side.shape.num_tokens))
    return out.add_((q * low).sum(-1, True))


def _values(p: Tensor, rows: SideBytes, side: KittySide) -> Tensor:
    raise ValueError(f"{side.family.name} sides are sides of K")


KITTY_CPU = CpuOps(seal, demote, dequantize, scores, _values)


def _steps(span: Tensor) -> Tensor:
    """Steps of channels by their ranges, which are negative in boosted ones."""
    return torch.maximum(span / 3, span / -15)


def _scores(codes: Tensor, low: Tensor, span: Tensor, ranking: Ranking) -> Tensor:
    """``reference.channel_scores`` in integers and products that float32 holds exactly."""
    num_tokens = codes.shape[2]
    if ranking == Ranking.RANDOM:
        return hash_channels(low.half(), span.half())
    total = codes.sum(2, dtype=torch.int32)
    if ranking == Ranking.VARIANCE:
        squares = (codes * codes).sum(2, dtype=torch.int32)
        return span.square() * (num_tokens * squares - total.square())
    # The first code of a channel that stands for a value of at least 0; those below stand for negative ones.
    values = torch.addcmul((15 * low).unsqueeze(2), span.unsqueeze(2), torch.arange(16.0)[:, None])
    is_negative = codes < (values < 0).sum(2, keepdim=True, dtype=torch.uint8)
    count = num_tokens - 2 * is_negative.sum(2, dtype=torch.int32)
    total -= 2 * (codes * is_negative).sum(2, dtype=torch.int32)
    return 15 * low * count + span * total


def _store_codes(codes: Tensor, channels: Tensor, is_boosted: Tensor, out: SideBytes, side: KittySide) -> None:
    base, high = code_sets(out, side)
    shrunk = (codes + 3).mul_(3).bitwise_right_shift_(4)
    base.copy_(pack(torch.where(is_boosted.unsqueeze(2), codes & 3, shrunk), 2, "k"))
    index = channels.unsqueeze(2).expand(-1, -1, side.shape.num_tokens, -1)
    high.copy_(pack((codes >> 2).gather(3, index), 2, "k"))


def _store_meta(meta: Tensor, channels: Tensor, is_boosted: Tensor, out: SideBytes, side: KittySide) -> None:
    """Shapes:  meta [2, n, H, D] fp16"""
    low, span = meta
    pairs(out, side).copy_(torch.stack((low, torch.where(is_boosted, -span, span)), 2))
    head_metas(out, side)[..., side.numbers_offset + side.boosted :].zero_()
    numbers(out, side).copy_(channels)
    tops(out, side).copy_(span.amax(-1))
