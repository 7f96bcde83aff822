"""Codes of 1, 2, 3, 4 or 8 bits in byte planes along tokens.

A plane set of width w over T tokens has T * w / 8 lanes; token t is bits [w * p, w * p + w) of byte lane
t % lanes, p = t // lanes. So one shift and one ``and`` on a whole tile give a run of consecutive tokens.
K keeps its lanes as rows, ``[lanes, D]``, and V as columns, ``[D, lanes]``: each is the operand an attention
dot wants. Codes of 3 bits are a set of the low 2 bits followed by a set of the high bit.
"""

from __future__ import annotations

from functools import lru_cache

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
    """The inverse of ``pack``; codes of 8 bits are a view.

    Shapes:  packed [..., T * bits / 8 * D] uint8;  returns codes [..., T, D] uint8
    """
    first, codes = 0, None
    for width, low in plane_sets(bits):
        nbytes = packed.shape[-1] * width // bits
        tile = _tile(packed[..., first : first + nbytes], width, side, num_tokens)
        first += nbytes
        if width < 8:
            tile = tile >> _shifts(width, packed.device) & (1 << width) - 1
        planes = (tile if side == "k" else tile.mT).flatten(-3, -2)
        codes = planes if codes is None else codes | planes << low
    assert codes is not None
    return codes


def _tile(packed: Tensor, width: int, side: SideName, num_tokens: int) -> Tensor:
    """The bytes of a plane set: K [..., 1, lanes, D] or V [..., 1, D, lanes], a view."""
    lanes = num_tokens * width // 8
    return packed.view(*packed.shape[:-1], 1, *((lanes, -1) if side == "k" else (-1, lanes)))


@lru_cache
def _shifts(width: int, device: torch.device) -> Tensor:
    """Where the planes begin in a byte, [planes, 1, 1] uint8."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)[:, None, None]


@lru_cache
def _masks(width: int, device: torch.device) -> Tensor:
    """The bits of each plane in a byte, [planes, 1, 1] uint8."""
    return (1 << width) - 1 << _shifts(width, device)


def mask_planes(tile: Tensor, width: int) -> Tensor:
    """Bytes [..., 1, rows, columns] as planes [..., planes, rows, columns], bits where they are; of 8 bits a view."""
    return tile if width == 8 else tile & _masks(width, tile.device)


ROOMS = {4: 0x0001, 2: 0x0101, 1: 0x1111}  # lowest bits of the rooms that pairs of codes of 2b bits have in a word


def narrow(packed: Tensor, from_bits: int, to_bits: int, side: SideName, num_tokens: int, out: Tensor) -> None:
    """``shrink`` on packed codes, by halves; neither width is 3 bits.

    Shapes:  packed [..., T * from_bits / 8 * D], out [..., T * to_bits / 8 * D] uint8
    """
    head_dim = packed.shape[-1] * 8 // (num_tokens * from_bits)
    rows = 1 if side == "k" else head_dim  # within which lanes are contiguous
    bits = from_bits // 2
    while bits > to_bits:
        half = packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 2)
        _halve(packed, bits, rows, half)
        packed, bits = half, bits // 2
    _halve(packed, bits, rows, out)


def _halve(packed: Tensor, bits: int, rows: int, out: Tensor) -> None:
    """From 2 * ``bits`` bits to ``bits``, on 16-bit words of two to eight codes.

    The codes of a pair are shrunk one after the other, each in the room of both, by
    X_b = ((2^b - 1) (X_2b + 2^(b-1) + 1)) >> 2b, which equals ``shrink`` and needs 3b bits. Then the second half
    of the lanes, whose tokens follow those of the first plane by plane, goes beside the first half.
    """
    words = packed.view(torch.int16)
    wide, top, room = 2 * bits, (1 << bits) - 1, ROOMS[bits]
    mask, summand = room * ((1 << wide) - 1), room * ((1 << bits - 1) + 1)
    small = (words & mask).add_(summand).mul_(top).bitwise_right_shift_(wide).bitwise_and_(room * top)
    small |= (words >> wide).bitwise_and_(mask).add_(summand).mul_(top).bitwise_and_(room * top << wide)
    first, second = small.unflatten(-1, (rows, -1)).chunk(2, -1)
    torch.add(first, second, alpha=1 << bits, out=out.view(torch.int16).unflatten(-1, (rows, -1)))


def planes(packed: Tensor, bits: int, side: SideName, num_tokens: int) -> Tensor:
    """The codes plane by plane (consecutive tokens), still in their place in a byte: 2^(bits p) times too large.

    Leaving the shift to a factor that is free elsewhere, in a scale, saves a pass over the codes. 3 bits are one plane.

    Shapes:  packed [..., T * bits / 8 * D];  returns K [..., planes, lanes, D] or V [..., planes, D, lanes]; all uint8
    """
    if bits == 3:
        codes = unpack(packed, bits, side, num_tokens)
        return (codes if side == "k" else codes.mT).unsqueeze(-3)
    return mask_planes(_tile(packed, bits, side, num_tokens), bits)
