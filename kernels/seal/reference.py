"""Sealing, plainly: minimum and range per group, codes to the nearest level."""

from __future__ import annotations

import torch
from torch import Tensor

from ..demote.reference import shrink
from ..layout import BlockLayout, DenseSide, UniformSide
from ..pages import read_dense, write_side

LIMIT = 32752.0  # half of fp16's largest value, so that min and range are both finite in fp16; exact in fp16


def quantize(x: Tensor, side: UniformSide) -> tuple[Tensor, Tensor]:
    """Codes and (min, range) of ``x``.

    min is the group's smallest value rounded down to fp16, range the distance from it to the largest value rounded
    up, so every value lies in [min, min + range] and none is clipped. Codes of 8 bits are (x - min) * 255 / range to
    the nearest integer, halves to even; those of 4, 2 and 1 bits are shrunk from them, so that sealing to few bits
    equals demotion to few bits, code for code. 3 bits lie off that chain: (x - min) * 7 / range.
    A constant group has codes 0 and, where fp16 holds the constant, range 0. Non-finite values count as 0 and
    values beyond +-32752 as +-32752.

    Shapes:  x [n, H, T, D], any float type;  returns codes [n, H, T, D] uint8, meta [2, n, H, num_groups, D or T] fp16
    """
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


def seal_reference(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> Tensor:
    """The same as ``seal``, one page side at a time."""
    finite = torch.ones(len(src), dtype=torch.int64)
    for block, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        for i, (old, new) in enumerate(zip(source.sides, target.sides, strict=True)):
            if not isinstance(old, DenseSide):
                continue
            first = a + source.offsets[i]
            out = memory[first : first + old.nbytes]
            x = read_dense(out.unsqueeze(0), old)
            finite[block] &= x.isfinite().all()
            if isinstance(new, UniformSide):
                out = write_side(*quantize(x, new), new)[0]
            first = b + target.offsets[i]
            memory[first : first + len(out)] = out
    return finite
