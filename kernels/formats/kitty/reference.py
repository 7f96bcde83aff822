"""Kitty sides, plainly: 4-bit codes, a score for each channel, and the bits of codes that each channel keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import SideBytes
from ..uniform import UniformSide
from ..uniform.codes import pack, unpack
from ..uniform.reference import encode, read_meta, shrink
from ..uniform.reference import read_codes as read_uniform
from .layout import KittySide, Ranking


def quantize(x: Tensor, side: KittySide, bank: Tensor | None = None) -> SideBytes:
    """The bytes of ``x`` as sides: 4-bit codes and (min, range) as of uniform sides, then ``write``.

    Shapes:  x [n, H, T, D], any float type
    """
    return write(*encode(x, side.uniform(4)), side)


def demote(rows: SideBytes, old: UniformSide, new: KittySide) -> SideBytes:
    """The bytes of uniform sides of 8 or 4 bits as Kitty sides; (min, range) stay."""
    codes = shrink(read_uniform(rows, old).int(), old.bits, 4).to(torch.uint8)
    return write(codes, read_meta(rows, old), new)


def dequantize(rows: SideBytes, side: KittySide) -> Tensor:
    """x = min + code * range / 15 in boosted channels, / 3 in others, [n, H, T, D] float32."""
    low, span = pairs(rows, side).float().unbind(2)
    step = torch.where(span.signbit(), -span / 15, span / 3)
    return low.unsqueeze(2) + read_codes(rows, side).float() * step.unsqueeze(2)


def write(codes: Tensor, meta: Tensor, side: KittySide) -> SideBytes:
    """The bytes of sides: boosted channels keep their codes, all other codes shrink to 2 bits.

    Shapes:  codes [n, H, T, D] uint8, of 4 bits;  meta [2, n, H, 1, D] fp16
    """
    low, span = meta.squeeze(3)
    channels, is_boosted = choose(channel_scores(codes, low, span, side.ranking), side.boosted)
    base = torch.where(is_boosted.unsqueeze(2), codes & 3, shrink(codes, 4, 2))
    high = (codes >> 2).gather(3, channels.unsqueeze(2).expand(-1, -1, codes.shape[2], -1))
    heads = codes.new_zeros(*span.shape[:2], side.head_meta_nbytes)
    signed = torch.where(is_boosted, -span, span)
    heads[..., : side.numbers_offset] = torch.stack((low, signed), 2).flatten(2).view(torch.uint8)
    heads[..., side.numbers_offset : side.numbers_offset + side.boosted] = channels
    top = span.amax(-1, keepdim=True).view(torch.uint8)
    packed = torch.cat((pack(base, 2, "k"), pack(high, 2, "k")), -1)
    return SideBytes(packed.flatten(1), torch.cat((heads.flatten(1), top.flatten(1)), 1))


def channel_scores(codes: Tensor, low: Tensor, span: Tensor, ranking: Ranking) -> Tensor:
    """Scores [n, H, D] float32, rounded once, of 4-bit codes [n, H, T, D] and (min, range) [n, H, D] fp16.

    Magnitude: sum over tokens of |15 min + code range|. Variance: range^2 (T sum code^2 - (sum code)^2). Random: a
    hash of (min, range) and the channel number. None depends on the width that the codes came from.
    """
    if ranking == Ranking.RANDOM:
        return hash_channels(low, span)
    codes, low, span = codes.double(), low.double(), span.double()
    if ranking == Ranking.VARIANCE:
        spread = codes.shape[2] * codes.square().sum(2) - codes.sum(2).square()
        return (span.square() * spread).float()
    return (15 * low.unsqueeze(2) + codes * span.unsqueeze(2)).abs().sum(2).float()


def hash_channels(low: Tensor, span: Tensor) -> Tensor:
    """24 bits that look random for each channel, float32: the finalizer of MurmurHash3 on min, range and number."""
    words = (span.view(torch.int16).long() & 0xFFFF) << 16 | (low.view(torch.int16).long() & 0xFFFF)
    words = words ^ (torch.arange(low.shape[-1], device=low.device) * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ words >> shift) * factor & 0xFFFFFFFF
    return ((words ^ words >> 16) >> 8).float()


def choose(scores: Tensor, boosted: int) -> tuple[Tensor, Tensor]:
    """The numbers [..., boosted] int64, ascending, of the channels with the largest scores, and [..., D] bool.

    Of equal scores the lower channel number wins.
    """
    channels = scores.sort(stable=True, dim=-1, descending=True).indices[..., :boosted].sort(-1).values
    return channels, torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, channels, True)


# ---- views of bytes


def code_sets(rows: SideBytes, side: KittySide) -> tuple[Tensor, Tensor]:
    """The 2-bit sets of all channels and of the boosted ones, views [n, H, T / 4 * D or boosted] uint8."""
    size = side.shape.num_tokens // 4 * side.shape.head_dim
    heads = rows.codes.unflatten(1, (side.shape.num_kv_heads, -1))
    return heads[..., :size], heads[..., size:]


def head_metas(rows: SideBytes, side: KittySide) -> Tensor:
    """The metadata of each head, a view [n, H, head_meta_nbytes] uint8."""
    return rows.meta[:, : side.top_offset].unflatten(1, (side.shape.num_kv_heads, -1))


def pairs(rows: SideBytes, side: KittySide) -> Tensor:
    """(min, range) of every channel, ranges of boosted ones negative, a view [n, H, 2, D] fp16."""
    return head_metas(rows, side)[..., : side.numbers_offset].view(torch.float16).unflatten(-1, (2, -1))


def numbers(rows: SideBytes, side: KittySide) -> Tensor:
    """The numbers of boosted channels, a view [n, H, boosted] uint8."""
    return head_metas(rows, side)[..., side.numbers_offset : side.numbers_offset + side.boosted]


def read_codes(rows: SideBytes, side: KittySide) -> Tensor:
    """Codes [n, H, T, D] uint8, of 4 bits in boosted channels and of 2 in others."""
    low, high = (unpack(part, 2, "k", side.shape.num_tokens) for part in code_sets(rows, side))
    channels = numbers(rows, side).long()
    return low.scatter_add(3, channels.unsqueeze(2).expand(high.shape), high << 2)
