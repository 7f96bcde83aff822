"""Uniform sides, plainly: minimum and range per group, codes to the nearest level, and the bytes of both."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import LIMIT, SideBytes
from .codes import pack, unpack
from .layout import TILES, HeadSide, UniformSide


def quantize(x: Tensor, side: UniformSide, bank: Tensor | None = None) -> SideBytes:
    """The bytes of ``x`` as sides.

    min is the group's smallest value rounded down to fp16, range the distance from it to the largest value rounded
    up, so every value lies in [min, min + range] and none is clipped. Codes of 8 bits are (x - min) * 255 / range to
    the nearest integer, halves to even; those of 4, 2 and 1 bits are shrunk from them, so that sealing to few bits
    equals demotion to few bits, code for code. 3 bits lie off that chain: (x - min) * 7 / range.
    A constant group has codes 0 and, where fp16 holds the constant, range 0. Non-finite values count as 0 and
    values beyond +-32752 as +-32752.

    Shapes:  x [n, H, T, D], any float type
    """
    return write(*encode(x, side), side)


def dequantize(rows: SideBytes, side: UniformSide) -> Tensor:
    """x = low + code * span / (2^bits - 1), (low, span) being ``calibrated``: [n, H, T, D] float32."""
    low, span = calibrated(read_meta(rows, side), side)
    codes = read_codes(rows, side).float()
    return spread(low, side) + codes * spread(span / side.max_code, side)


def calibrated(meta: Tensor, side: UniformSide) -> Tensor:
    """(min, range) [2, ...] as the values of the lowest level and their distance from the highest, float32."""
    low, span = meta = meta.float()
    if side.eta:
        meta = torch.stack((low + float(side.eta) * span, (1 - 2 * float(side.eta)) * span))
    return meta


def demote(rows: SideBytes, old: UniformSide, new: UniformSide) -> SideBytes:
    """The bytes of sides ``old`` as ``new``, of fewer bits: codes shrink, (min, range) stay."""
    if new.is_subordinate:
        return SideBytes(rows.codes[:, :0], rows.meta)
    codes = shrink(read_codes(rows, old).int(), old.bits, new.bits).to(torch.uint8)
    return write(codes, read_meta(rows, old), new)


def encode(x: Tensor, side: UniformSide) -> tuple[Tensor, Tensor]:
    """Codes [n, H, T, D] uint8 and (min, range) [2, n, H, num_groups, D or T] fp16 of ``x``; see ``quantize``."""
    x = torch.where(x.isfinite(), x, 0).float().clamp(-LIMIT, LIMIT)
    dim = 2 if side.axis == "channel" else 3
    codes, lows, spans = [], [], []
    for part in x.split(side.group, dim):
        low = round_down(part.amin(dim, keepdim=True))
        span = round_up(part.amax(dim, keepdim=True) - low.float())
        codes.append(_codes(part, low.float(), span.float(), side.bits))
        lows.append(low)
        spans.append(span)
    meta = torch.stack([torch.cat(lows, dim), torch.cat(spans, dim)])
    return torch.cat(codes, dim), meta if side.axis == "channel" else meta.mT


def _codes(x: Tensor, low: Tensor, span: Tensor, bits: int) -> Tensor:
    max_code = 7 if bits == 3 else 255
    divisor = torch.where(span > 0, span, 1)
    codes = ((x - low) * max_code / divisor).round().int()
    return (codes if bits == 3 else shrink(codes, 8, bits)).to(torch.uint8)


def shrink(codes: Tensor, from_bits: int, to_bits: int) -> Tensor:
    """X_b = ((2^2b - 2^b + 1) (X_2b + 2^(b-1))) >> 3b, from ``from_bits`` down to ``to_bits`` by halves.

    That is X_2b / (2^b + 1) to the nearest integer; ties cannot occur, the divisor being odd. Exact for every code.
    Shapes:  codes [...] of any integer type that holds 16 bits unsigned;  returns [...] of the same type
    Source:  PM-KVQ (arXiv 2505.18610), equivalent right shift
    """
    bits = from_bits
    while bits > to_bits:
        bits //= 2
        codes = ((1 << 2 * bits) - (1 << bits) + 1) * (codes + (1 << bits - 1)) >> 3 * bits
    return codes


def round_down(x: Tensor) -> Tensor:
    """The largest fp16 value that is not above ``x`` (float32, within fp16's range). Zero is always +0."""
    half = (x + 0.0).half()
    pattern = half.view(torch.int16)
    below = torch.where(pattern < 0, pattern + 1, pattern - 1)
    return torch.where(half.float() > x, below, pattern).view(torch.float16)


def round_up(x: Tensor) -> Tensor:
    """The smallest fp16 value that is not below ``x`` >= 0 (float32, within fp16's range)."""
    half = x.half()
    pattern = half.view(torch.int16)
    return torch.where(half.float() < x, pattern + 1, pattern).view(torch.float16)


# ---- bytes


def read_codes(rows: SideBytes, side: UniformSide) -> Tensor:
    """Codes [n, H, T, D] uint8."""
    return unpack(head_codes(rows, side), side.bits, side.name, side.shape.num_tokens)


def head_codes(rows: SideBytes, side: UniformSide) -> Tensor:
    """The packed codes of each head, a view [n, H, T * bits / 8 * D] uint8."""
    return rows.codes.unflatten(1, (side.shape.num_kv_heads, -1))


def meta_tile(rows: SideBytes, side: UniformSide) -> Tensor:
    """(min, range) of every group, a view to read or write.

    Shapes:  returns fp16, by axis: channel [2, n, H, num_groups, D] or token [2, n, H, num_groups, tiles, lanes]
    """
    words, heads = rows.meta.view(torch.float16), (len(rows.meta), side.shape.num_kv_heads)
    outer, start = (words.stride(0), side.head_meta_nbytes // 2), words.storage_offset()
    across, num_groups = side.across, side.num_groups
    if side.axis == "channel":
        return words.as_strided((2, *heads, num_groups, across), (num_groups * across, *outer, across, 1), start)
    lanes = across // TILES
    return words.as_strided((2, *heads, num_groups, TILES, lanes), (1, *outer, 2 * across, 2, 2 * TILES), start)


def read_meta(rows: SideBytes, side: UniformSide) -> Tensor:
    """(min, range) of every group, [2, n, H, num_groups, D or T] fp16, by axis channel or token."""
    tile = meta_tile(rows, side)
    return tile if side.axis == "channel" else tile.flatten(-2)


def tops(rows: SideBytes, side: HeadSide) -> Tensor:
    """The largest range of each head, a view [n, H] fp16."""
    return rows.meta[:, side.top_offset :].view(torch.float16)


def write(codes: Tensor, meta: Tensor, side: UniformSide) -> SideBytes:
    """The bytes of sides, of subordinate ones without codes. Inverse of ``read_codes`` and ``read_meta``.

    Shapes:  codes [n, H, T, D] uint8;  meta [2, n, H, num_groups, D or T] fp16
    """
    heads = _pairs(meta, side).flatten(2).contiguous().view(torch.uint8)
    top = meta[1].amax((-2, -1)).unsqueeze(-1).view(torch.uint8)
    packed = pack(codes, side.bits, side.name).flatten(1)[:, : side.codes_nbytes]
    return SideBytes(packed, torch.cat([heads.flatten(1), top.flatten(1)], 1))


def _pairs(meta: Tensor, side: UniformSide) -> Tensor:
    """(min, range) [2, n, H, num_groups, D or T] in the order of a head's bytes, [n, H, ...]."""
    if side.axis == "channel":
        return meta.movedim(0, 2)
    return meta.movedim(0, -1).unflatten(-2, (TILES, -1)).transpose(-3, -2)


def spread(meta: Tensor, side: UniformSide) -> Tensor:
    """Group values to elements.

    Shapes:  meta [n, H, num_groups, D or T];  returns a tensor that broadcasts with [n, H, T, D]
    """
    if side.num_groups == 1:
        return meta if side.axis == "channel" else meta.mT
    if side.axis == "channel":
        return meta.repeat_interleave(side.group, 2)
    return meta.mT.repeat_interleave(side.group, 3)[..., : side.shape.head_dim]
