"""Kitty sides in vectorised torch: sealing, demotion, and attention on the bare codes of both sets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import CpuOps, SideBytes
from ..uniform import UniformSide
from ..uniform.codes import code_planes, pack, token_factors
from ..uniform.cpu import seal as seal_uniform
from ..uniform.reference import meta_tile, read_codes
from .layout import KittySide, Ranking
from .reference import (
    BOOST,
    choose,
    code_sets,
    hash_channels,
    head_metas,
    numbers,
    pairs,
    read,
    tops,
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
    codes = read_codes(rows, old)
    if old.bits == 8:
        codes = codes.to(torch.int16).add_(9).mul_(15).bitwise_right_shift_(8).to(torch.uint8)  # see ``codes.narrow``
    meta = meta_tile(rows, old).squeeze(3)
    channels, is_boosted = choose(_scores(codes, *meta.float(), new.ranking), new.boosted)
    _store_codes(codes, channels, is_boosted, out, new)
    _store_meta(meta, channels, is_boosted, out, new)


def dequantize(rows: SideBytes, side: KittySide, dtype: torch.dtype) -> Tensor:
    """Elements [n, H, T, D]."""
    low, span = pairs(rows, side).float().split(1, 2)
    codes, is_boosted = read(rows, side)
    out = codes.float().mul_(span * _steps(is_boosted).unsqueeze(2) / 3)
    return out.add_(low).to(dtype)


def scores(q: Tensor, rows: SideBytes, side: KittySide) -> tuple[Tensor, Tensor | None]:
    """logits_t = sum_d (q_d step_d) (low_td + 4 high_td) + sum_d q_d min_d; the last sum is shared by all tokens."""
    n, heads, queries, _ = q.shape
    low, span = pairs(rows, side).float().split(1, 2)
    channels = numbers(rows, side).long()
    is_boosted = torch.zeros(n, heads, q.shape[3], dtype=torch.bool).scatter_(-1, channels, True)
    inputs = q * span * _steps(is_boosted).unsqueeze(2)
    boosted = inputs.gather(3, channels.unsqueeze(2).expand(-1, -1, queries, -1))
    base, high = (code_planes(part, 2, "k", side.shape.num_tokens).float() for part in code_sets(rows, side))
    out = torch.bmm(inputs.flatten(0, 1), base.flatten(2, 3).flatten(0, 1).mT)
    out.baddbmm_(boosted.flatten(0, 1), high.flatten(2, 3).flatten(0, 1).mT, alpha=4)
    out = out.view(n, heads, queries, -1).mul_(token_factors(2, side.shape.num_tokens))
    return out, (q * low).sum(-1)


def _values(p: Tensor, rows: SideBytes, side: KittySide) -> Tensor:
    raise ValueError(f"{side.family.name} sides are sides of K")


KITTY_CPU = CpuOps(seal, demote, dequantize, scores, _values)


def _steps(is_boosted: Tensor) -> Tensor:
    """Steps of each channel in thirds of its range."""
    return torch.where(is_boosted, 1 / BOOST, 1.0)


def _scores(codes: Tensor, low: Tensor, span: Tensor, ranking: Ranking) -> Tensor:
    """``reference.channel_scores`` in integers and products that float32 holds exactly."""
    num_tokens = codes.shape[2]
    if ranking == Ranking.RANDOM:
        return hash_channels(low.half(), span.half())
    total = codes.sum(2, dtype=torch.int32)
    if ranking == Ranking.VARIANCE:
        squares = (codes * codes).sum(2, dtype=torch.int32)
        return span.square() * (num_tokens * squares - total.square())
    # A code below the first one whose value is not negative stands for a negative value.
    first = sum((15 * low + code * span < 0).to(torch.uint8) for code in range(16))
    is_negative = codes < first.unsqueeze(2)
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
    pairs(out, side).copy_(meta.movedim(0, 2))
    index = head_metas(out, side)[..., side.mask_offset :].zero_()
    for bit in range(8):
        part = is_boosted[..., bit::8]
        index[..., : part.shape[-1]] |= part.to(torch.uint8) << bit
    numbers(out, side).copy_(channels)
    tops(out, side).copy_(meta[1].amax(-1))
