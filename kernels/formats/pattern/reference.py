"""Pattern sides, plainly: the choice of each token's pattern, and the bytes of the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import LIMIT, SideBytes
from ..uniform import UniformSide
from ..uniform import reference as uniform
from ..uniform.layout import TILES
from .layout import NO_PATTERN, PatternSide, gate


def quantize(x: Tensor, side: PatternSide, bank: Tensor | None = None) -> SideBytes:
    """The bytes of ``x`` as sides, with the patterns in ``bank``.

    Shapes:  x [n, H, T, D], any float type;  bank as ``SideBytes.bank``
    """
    x = torch.where(x.isfinite(), x, 0).float().clamp(-LIMIT, LIMIT)
    index, residual = split(x, read_patterns(bank, side), side)
    rows = uniform.quantize(residual, side.residual)
    bytes_ = index.unflatten(2, (TILES, -1))
    bytes_ = (bytes_.mT if side.name == "k" else bytes_).flatten(1)
    return SideBytes(rows.codes, torch.cat((bytes_, rows.meta), 1))


def dequantize(rows: SideBytes, side: PatternSide) -> Tensor:
    """x = residual + pattern: [n, H, T, D] float32."""
    x = uniform.dequantize(residual_rows(rows, side), side.residual)
    return x + chosen(read_patterns(rows.bank, side), read_index(rows, side))


def demote(rows: SideBytes, old: PatternSide, new: PatternSide) -> SideBytes:
    """The bytes of sides ``old`` as ``new``, of fewer bits: codes shrink, metadata stays."""
    codes = uniform.demote(residual_rows(rows, old), old.residual, new.residual).codes
    return SideBytes(codes, rows.meta)


# ---- assignment


def split(x: Tensor, patterns: Tensor, side: PatternSide) -> tuple[Tensor, Tensor]:
    """The index of each token's pattern, ``NO_PATTERN`` for none, [n, H, T] uint8, and the residual of ``x``.

    Each token tries the nearest pattern. K takes patterns where they shrink the ranges of a page's head, V where they
    shrink the token's own to the share that ``gate`` allows.

    Shapes:  x [n, H, T, D] float32, finite;  patterns [n, H, M, D] float32
    """
    index = _nearest(x, patterns)
    rest = x - chosen(patterns, index)
    if side.name == "k":
        pays = (_spread(rest, side.residual) < _spread(x, side.residual)).unsqueeze(2)
    else:
        pays = _range(rest) <= _range(x) * torch.tensor(gate(side.shape.head_dim), dtype=torch.float32)
    return torch.where(pays, index, NO_PATTERN), torch.where(pays.unsqueeze(3), rest, x)


def _nearest(x: Tensor, patterns: Tensor) -> Tensor:
    """The nearest pattern of each token by Euclidean distance, the first of several: [n, H, T] uint8."""
    wide = patterns.double()
    distance = wide.square().sum(-1).unsqueeze(2) - 2 * x.double() @ wide.mT
    return distance.argmin(-1).to(torch.uint8)


def _spread(x: Tensor, side: UniformSide) -> Tensor:
    """The sum of the ranges of all groups of tokens of a head, [n, H] float64, where order does not matter."""
    groups = x.unflatten(2, (side.num_groups, side.group))
    return (groups.amax(3) - groups.amin(3)).double().sum((2, 3))


def _range(x: Tensor) -> Tensor:
    """The range of each token's channels."""
    return x.amax(-1) - x.amin(-1)


def chosen(patterns: Tensor, index: Tensor) -> Tensor:
    """The pattern of each token, zeros for none.

    Shapes:  patterns [n, H, M, D];  index [n, H, T] uint8;  returns [n, H, T, D]
    """
    at = index.long().clamp(max=patterns.shape[2] - 1)
    found = patterns.gather(2, at.unsqueeze(3).expand(-1, -1, -1, patterns.shape[3]))
    return found.masked_fill_((index == NO_PATTERN).unsqueeze(3), 0)


# ---- views of bytes


def read_patterns(bank: Tensor | None, side: PatternSide) -> Tensor:
    """The patterns of ``SideBytes.bank`` and the zeros behind them, [n, H, rows, D] float32.

    A block that is sealed gets a part of the bank, the patterns it may choose from.
    """
    assert bank is not None, "sides with patterns go with their banks"
    shape = side.shape
    rows = bank[:, : side.num_rows * side.pattern_nbytes].view(torch.float16)
    return rows.view(len(bank), -1, shape.num_kv_heads, shape.head_dim).transpose(1, 2).float()


def index_tile(rows: SideBytes, side: PatternSide) -> Tensor:
    """The index of each token's pattern, a view to read or write, [n, H, tiles, lanes] uint8."""
    heads = rows.meta[:, : side.index_nbytes].unflatten(1, (side.shape.num_kv_heads, -1))
    return heads.unflatten(2, (-1, TILES)).mT if side.name == "k" else heads.unflatten(2, (TILES, -1))


def read_index(rows: SideBytes, side: PatternSide) -> Tensor:
    """The index of each token's pattern, [n, H, T] uint8."""
    return index_tile(rows, side).flatten(2)


def residual_rows(rows: SideBytes, side: PatternSide) -> SideBytes:
    """The bytes of the residual, views."""
    return SideBytes(rows.codes, rows.meta[:, side.index_nbytes :])
