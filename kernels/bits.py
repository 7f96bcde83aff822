"""Codes of 1, 2, 3, 4 or 8 bits in byte planes along tokens.

A plane set of width w over T tokens has T * w / 8 lanes; token t is bits [w * p, w * p + w) of byte lane
t % lanes, p = t // lanes. So one shift and one ``and`` on a whole tile give a run of consecutive tokens.
K keeps its lanes as rows, ``[lanes, D]``, and V as columns, ``[D, lanes]``: each is the operand an attention
dot wants. Codes of 3 bits are a set of the low 2 bits followed by a set of the high bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .layout import SideName


def plane_sets(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, lowest bit in the code) of each plane set that a code of ``bits`` bits is stored in."""
    return ((2, 0), (1, 2)) if bits == 3 else ((bits, 0),)


def pack(codes: Tensor, bits: int, side: SideName) -> Tensor:
    """Shapes:  codes [..., T, D] uint8, each below 2^bits;  returns [..., T * bits / 8 * D] uint8"""
    *batch, num_tokens, head_dim = codes.shape
    parts = []
    for width, low in plane_sets(bits):
        planes = (codes >> low & (1 << width) - 1).view(*batch, 8 // width, num_tokens * width // 8, head_dim)
        packed = planes[..., 0, :, :].clone()
        for p in range(1, 8 // width):
            packed |= planes[..., p, :, :] << p * width
        parts.append((packed if side == "k" else packed.mT).flatten(-2))
    return torch.cat(parts, -1)


def unpack(packed: Tensor, bits: int, side: SideName, num_tokens: int) -> Tensor:
    """The inverse of ``pack``.

    Shapes:  packed [..., T * bits / 8 * D] uint8;  returns codes [..., T, D] uint8
    """
    batch, first, codes = packed.shape[:-1], 0, None
    head_dim = packed.shape[-1] * 8 // (num_tokens * bits)
    for width, low in plane_sets(bits):
        lanes = num_tokens * width // 8
        part = packed[..., first : first + lanes * head_dim]
        first += lanes * head_dim
        part = part.view(*batch, lanes, head_dim) if side == "k" else part.view(*batch, head_dim, lanes).mT
        planes = torch.stack([part >> p * width & (1 << width) - 1 for p in range(8 // width)], -3)
        planes = planes.flatten(-3, -2) << low
        codes = planes if codes is None else codes | planes
    assert codes is not None
    return codes


def planes(packed: Tensor, bits: int, side: SideName, num_tokens: int) -> Iterator[tuple[Tensor, int]]:
    """The codes plane by plane (consecutive tokens), still in their bytes: code = (byte & mask) / (mask & -mask).

    Leaving the shift to a factor that is free elsewhere, in a scale, saves a pass over the codes.

    Shapes:  packed [..., T * bits / 8 * D] uint8;  yields (bytes, mask), K [..., lanes, D] or V [..., D, lanes] uint8,
             in all T lanes
    """
    if bits == 3:
        codes = unpack(packed, bits, side, num_tokens)
        yield (codes if side == "k" else codes.mT), 7
        return
    lanes = num_tokens * bits // 8
    tile = packed.unflatten(-1, (lanes, -1) if side == "k" else (-1, lanes))
    for shift in range(0, 8, bits):
        yield tile, (1 << bits) - 1 << shift
