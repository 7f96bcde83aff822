"""Codes of 1, 2, 3, 4 or 8 bits packed along tokens, in plane sets as ``layout.py`` draws them.

K has its lanes as rows and V as columns, each as its attention dot takes the operand.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..family import SideName
from .layout import TILES


def pack(codes: Tensor, bits: int, side: SideName) -> Tensor:
    """Shapes:  codes [..., T, D] uint8, each below 2^bits;  returns [..., T * bits / 8 * D] uint8"""
    if bits == 3:
        return torch.cat((pack(codes & 3, 2, side), pack(codes >> 2, 1, side)), -1)
    if bits == 1:
        return _lay_out(_fold(_join(codes, TILES, 1)), side)
    return _lay_out(_join(codes, 8 // bits, bits), side)


def unpack(packed: Tensor, bits: int, side: SideName, num_tokens: int) -> Tensor:
    """The inverse of ``pack``; codes of 8 bits are a view.

    Shapes:  packed [..., T * bits / 8 * D] uint8;  returns codes [..., T, D] uint8
    """
    planes = _split(packed, bits, side, num_tokens)
    return (planes if side == "k" else planes.mT).flatten(-3, -2)


def _split(packed: Tensor, bits: int, side: SideName, num_tokens: int) -> Tensor:
    """Codes of consecutive runs of tokens: K [..., planes, lanes, D] or V [..., planes, D, lanes]."""
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
        return _split(low, 2, side, num_tokens) | _split(high, 1, side, num_tokens) << 2
    if bits == 1:
        tile, num_planes = _tile(packed, num_tokens // TILES, side), TILES
        tile = torch.cat((tile & 15, tile >> 4), -1 if side == "k" else -2)
    else:
        tile, num_planes = _tile(packed, num_tokens * bits // 8, side), 8 // bits
    if num_planes == 1:
        return tile.unsqueeze(-3)
    return tile.unsqueeze(-3) >> _shifts(num_planes, bits, tile.device) & (1 << bits) - 1


def _join(codes: Tensor, num_planes: int, width: int) -> Tensor:
    """Codes [..., T, D] of consecutive runs of tokens side by side in bytes [..., T / num_planes, D]."""
    planes = codes.unflatten(-2, (num_planes, -1))
    packed = planes[..., 0, :, :].clone()
    for p in range(1, num_planes):
        packed |= planes[..., p, :, :] << p * width
    return packed


def _fold(nibbles: Tensor) -> Tensor:
    """Nibbles of the first and the second half of the channels in one byte: [..., D] -> [..., D / 2]."""
    first, second = nibbles.chunk(2, -1)
    return first | second << 4


def _lay_out(tile: Tensor, side: SideName) -> Tensor:
    return (tile if side == "k" else tile.mT).flatten(-2)


def _tile(packed: Tensor, lanes: int, side: SideName) -> Tensor:
    """The bytes of a plane set: K [..., lanes, columns] or V [..., rows, lanes], a view."""
    return packed.view(*packed.shape[:-1], *((lanes, -1) if side == "k" else (-1, lanes)))


@lru_cache
def _shifts(num_planes: int, width: int, device: torch.device) -> Tensor:
    """The first bits of the planes in a byte, [planes, 1, 1] uint8."""
    return (torch.arange(num_planes, dtype=torch.uint8, device=device) * width)[:, None, None]


@lru_cache
def _masks(width: int, device: torch.device) -> Tensor:
    """The bits of each plane in a byte, [planes, 1, 1] uint8."""
    return (1 << width) - 1 << _shifts(8 // width, width, device)


def mask_planes(tile: Tensor, width: int) -> Tensor:
    """Bytes [..., 1, rows, columns] as planes [..., planes, rows, columns], bits where they are; of 8 bits a view."""
    return tile if width == 8 else tile & _masks(width, tile.device)


ROOMS = {4: 0x0001, 2: 0x0101}  # by bits b: lowest bits of the fields of a word that hold a pair of 2b-bit codes each


def narrow(packed: Tensor, from_bits: int, to_bits: int, side: SideName, num_tokens: int, out: Tensor) -> None:
    """``shrink`` on packed codes, by halves; neither width is 3 bits.

    Shapes:  packed [..., T * from_bits / 8 * D], out [..., T * to_bits / 8 * D] uint8
    """
    head_dim = packed.shape[-1] * 8 // (num_tokens * from_bits)
    rows = 1 if side == "k" else head_dim  # within which lanes are contiguous
    bits = from_bits // 2
    while bits >= max(2, to_bits):
        half = out if bits == to_bits else packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 2)
        _halve(packed, bits, rows, half)
        packed, bits = half, bits // 2
    if to_bits == 1:
        _keep_high_bits(_tile(packed, num_tokens // TILES, side), side, out)


def _halve(packed: Tensor, bits: int, rows: int, out: Tensor) -> None:
    """From 2 * ``bits`` bits to ``bits``, on 16-bit words of two or four codes.

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


def _keep_high_bits(tile: Tensor, side: SideName, out: Tensor) -> None:
    """From 2 bits to 1, which are their high bits: bytes of K [..., lanes, D] or V [..., D, lanes] into ``out``."""
    nibbles = tile >> 1 & 1
    for j in range(1, TILES):
        nibbles |= tile >> j + 1 & 1 << j
    dim = -1 if side == "k" else -2
    first, second = nibbles.chunk(2, dim)
    torch.add(first, second, alpha=16, out=out.view(first.shape))


def code_planes(packed: Tensor, bits: int, side: SideName, num_tokens: int) -> Tensor:
    """Codes plane by plane (consecutive tokens), left in their place in a byte: 2^(bits p) times too large.

    The shift goes into a factor that is applied anyway, in a scale, which saves a pass over the codes. Codes of 3 bits
    and of 1 bit are one plane.

    Shapes:  packed [..., T * bits / 8 * D];  returns K [..., planes, lanes, D] or V [..., planes, D, lanes]; all uint8
    """
    if bits % 2:
        planes = _split(packed, bits, side, num_tokens)
        return (planes.flatten(-3, -2) if side == "k" else planes.transpose(-3, -2).flatten(-2)).unsqueeze(-3)
    return mask_planes(_tile(packed, num_tokens * bits // 8, side).unsqueeze(-3), bits)


@lru_cache
def token_factors(bits: int, num_tokens: int) -> Tensor:
    """Factors from codes of ``code_planes`` to shares of the range, 2^(-bits p) / (2^bits - 1) in plane p: [T]."""
    num_planes = 1 if bits % 2 else 8 // bits
    shifts = torch.arange(num_planes).repeat_interleave(num_tokens // num_planes) * bits
    return 1 / ((2**bits - 1) * 2.0**shifts)
