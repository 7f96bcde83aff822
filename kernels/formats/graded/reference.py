"""Graded sides, plainly: 8-bit codes, shrunk to the width of each run, and means from codes of 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import SideBytes
from ..uniform import UniformSide
from ..uniform.codes import pack, unpack
from ..uniform.reference import calibrated, encode, read_codes, read_meta, shrink
from .layout import MEAN_BITS, GradedSide


def quantize(x: Tensor, side: GradedSide, bank: Tensor | None = None) -> SideBytes:
    """The bytes of ``x`` as sides: 8-bit codes and (min, range) as of uniform sides, then ``write``.

    Shapes:  x [n, H, T, D], any float type
    """
    return write(*encode(x, side.uniform(8)), 8, side)


def demote(rows: SideBytes, old: UniformSide, new: GradedSide) -> SideBytes:
    """The bytes of uniform sides of 8 or 4 bits as graded sides; (min, range) stay."""
    return write(read_codes(rows, old), read_meta(rows, old), old.bits, new)


def dequantize(rows: SideBytes, side: GradedSide) -> Tensor:
    """x = low + code * span / (2^bits - 1), (low, span) being ``calibrated``, or the mean: [n, H, T, D] float32."""
    parts = []
    metas = pairs(rows, side).split([run.channels for run in side.runs], -1)
    for packed, meta, run in zip(code_sets(rows, side), metas, side.run_sides, strict=True):
        low, span = calibrated(meta, run).unsqueeze(3)
        codes = unpack(packed, run.bits, side.name, side.shape.num_tokens).float()
        parts.append(low + codes * (span / run.max_code))
    parts.append(means(rows, side).float().unsqueeze(2).expand(-1, -1, side.shape.num_tokens, -1))
    return torch.cat(parts, -1)


def write(codes: Tensor, meta: Tensor, bits: int, side: GradedSide) -> SideBytes:
    """The bytes of sides: codes shrink to the width of their run, or to one mean a channel.

    Shapes:  codes [n, H, T, D] uint8, of ``bits`` bits;  meta [2, n, H, 1, D] fp16
    """
    low, span = meta.squeeze(3)
    coded, rest = side.coded, codes[..., side.coded :]
    channels = codes[..., :coded].int().split([run.channels for run in side.runs], -1)
    narrow = [shrink(part, bits, run.bits).to(torch.uint8) for part, run in zip(channels, side.runs, strict=True)]
    packed = torch.cat([pack(part, run.bits, side.name) for part, run in zip(narrow, side.runs, strict=True)], -1)
    total = shrink(rest.int(), bits, MEAN_BITS).sum(2)
    mean = mean_values(total, low[..., coded:], span[..., coded:], side)
    heads = torch.cat((low[..., :coded], span[..., :coded], mean), -1).view(torch.uint8)
    top = span[..., :coded].amax(-1, keepdim=True).view(torch.uint8)
    return SideBytes(packed.flatten(1), torch.cat((heads.flatten(1), top.flatten(1)), 1))


def mean_values(total: Tensor, low: Tensor, span: Tensor, side: GradedSide) -> Tensor:
    """Means of channels by the sums of their 4-bit codes: (range * sum) / (15 T) + min in float32, then fp16.

    The product is exact, so the quotient, the sum and the mean round once each.
    """
    levels = (2**MEAN_BITS - 1) * side.shape.num_tokens
    return (span.float() * total.float() / levels + low.float()).half()


# ---- views of bytes


def code_sets(rows: SideBytes, side: GradedSide) -> tuple[Tensor, ...]:
    """The packed codes of each run, views [n, H, T * bits / 8 * channels] uint8."""
    heads = rows.codes.unflatten(1, (side.shape.num_kv_heads, -1))
    return heads.split([run.head_codes_nbytes for run in side.run_sides], -1)


def head_metas(rows: SideBytes, side: GradedSide) -> Tensor:
    """The metadata of each head, a view [n, H, head_meta_nbytes / 2] fp16."""
    heads = rows.meta[:, : side.top_offset].view(torch.float16)
    return heads.unflatten(1, (side.shape.num_kv_heads, -1))


def pairs(rows: SideBytes, side: GradedSide) -> Tensor:
    """(min, range) of the channels with codes, a view [2, n, H, C] fp16."""
    return head_metas(rows, side)[..., : 2 * side.coded].unflatten(-1, (2, -1)).movedim(2, 0)


def means(rows: SideBytes, side: GradedSide) -> Tensor:
    """The means of the channels without codes, a view [n, H, D - C] fp16."""
    return head_metas(rows, side)[..., 2 * side.coded :]
