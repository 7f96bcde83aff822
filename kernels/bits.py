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


ROOMS = {4: 0x0001, 2: 0x0101, 1: 0x1111}  # lowest bits of the rooms that pairs of codes of 2b bits have in a word


def narrow(packed: Tensor, from_bits: int, to_bits: int, side: SideName, out: Tensor) -> None:
    """``shrink`` on packed codes, by halves; neither width is 3 bits.

    Shapes:  packed [..., D * 16 * from_bits], out [..., D * 16 * to_bits] uint8, of 128 tokens, in any outer strides
    """
    bits = from_bits // 2
    while bits > to_bits:
        packed = _halve(packed, bits, side, packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 2))
        bits //= 2
    _halve(packed, bits, side, out)


def _halve(packed: Tensor, bits: int, side: SideName, out: Tensor) -> Tensor:
    """From 2 * ``bits`` bits to ``bits``, four to sixteen codes at a time.

    The codes of a pair are shrunk one after the other, each in the room of both, by
    X_b = ((2^b - 1) (X_2b + 2^(b-1) + 1)) >> 2b, which equals ``shrink`` and needs 3b bits. Then the second half
    of the lanes, whose tokens follow those of the first plane by plane, goes beside the first half.
    """
    words = packed.view(torch.int16)
    wide, top, room = 2 * bits, (1 << bits) - 1, ROOMS[bits]
    mask, summand = room * ((1 << wide) - 1), room * ((1 << bits - 1) + 1)
    small = (words & mask).add_(summand).mul_(top).bitwise_right_shift_(wide).bitwise_and_(room * top)
    small |= (words >> wide).bitwise_and_(mask).add_(summand).mul_(top).bitwise_and_(room * top << wide)
    rows = 1 if side == "k" else packed.shape[-1] // (16 * wide)
    first, second = small.unflatten(-1, (rows, -1)).chunk(2, -1)
    torch.add(first, second, alpha=1 << bits, out=out.view(torch.int16).unflatten(-1, (rows, -1)))
    return out


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
