"""Page sides as torch tensors: their bytes to and from a block slot, their metadata to and from bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from .bits import pack, unpack
from .layout import DenseSide, UniformSide


def gather(memory: Tensor, addresses: Tensor, nbytes: int) -> Tensor:
    """Copies of ``nbytes`` bytes of the arena from each address.

    Shapes:  memory [M] uint8;  addresses [n] int64, multiples of 16;  returns [n, nbytes] uint8
    """
    words = memory.view(torch.int64)
    # One overlapping row for every 16-byte position, so that a single index_select copies whole runs of bytes.
    num_rows = (memory.numel() - nbytes) // 16 + 1
    rows = words.as_strided((num_rows, nbytes // 8), (2, 1))
    return rows.index_select(0, addresses // 16).view(torch.uint8)


def scatter(memory: Tensor, addresses: list[int], rows: Tensor) -> None:
    """Writes row i of ``rows`` [n, nbytes] uint8 at address i."""
    nbytes = rows.shape[1]
    for address, row in zip(addresses, rows, strict=True):
        memory[address : address + nbytes] = row


def read_dense(rows: Tensor, side: DenseSide) -> Tensor:
    """Shapes:  rows [n, nbytes] uint8;  returns [n, H, T, D] in the side's dtype, a view"""
    shape = (len(rows), side.num_kv_heads, side.num_tokens, side.head_dim)
    return rows.view(side.dtype).view(shape)


def read_codes(rows: Tensor, side: UniformSide) -> Tensor:
    """Shapes:  rows [n, nbytes] uint8;  returns codes [n, H, T, D] uint8"""
    packed = rows[:, : side.meta_offset].unflatten(1, (side.num_kv_heads, -1))
    return unpack(packed, side.bits, side.side, side.num_tokens)


def read_meta(rows: Tensor, side: UniformSide) -> Tensor:
    """(min, range) of every group, as stored.

    Shapes:  rows [n, nbytes] uint8;  returns [2, n, H, num_groups, D or T] fp16, by axis channel or token
    """
    across = side.head_dim if side.axis == "channel" else side.num_tokens
    meta = rows[:, side.meta_offset : side.top_offset].unflatten(1, (side.num_kv_heads, -1))
    pairs = meta[..., : 4 * side.num_groups * across].contiguous().view(torch.float16)
    if side.axis == "channel":
        return pairs.unflatten(-1, (2, side.num_groups, across)).movedim(2, 0)
    tile = pairs.unflatten(-1, (side.num_groups, side.meta_lanes, side.meta_planes, 2))
    return tile.permute(5, 0, 1, 2, 4, 3).flatten(-2)


def write_side(codes: Tensor, meta: Tensor, side: UniformSide) -> Tensor:
    """The bytes of page sides, without the padding at their end. Inverse of ``read_codes`` and ``read_meta``.

    Shapes:  codes [n, H, T, D] uint8;  meta [2, n, H, num_groups, D or T] fp16;  returns [n, used bytes] uint8
    """
    top = meta[1].amax((-2, -1))
    if side.axis == "channel":
        pairs = meta.movedim(0, 2)
    else:
        tile = meta.unflatten(-1, (side.meta_planes, side.meta_lanes))
        pairs = tile.permute(1, 2, 3, 5, 4, 0)
    meta_bytes = pairs.flatten(2).contiguous().view(torch.uint8)
    meta_bytes = torch.nn.functional.pad(meta_bytes, (0, side.head_meta_nbytes - meta_bytes.shape[-1]))
    parts = (pack(codes, side.bits, side.side), meta_bytes, top.unsqueeze(-1).view(torch.uint8))
    return torch.cat([part.flatten(1) for part in parts], 1)


def spread(meta: Tensor, side: UniformSide) -> Tensor:
    """Group values to elements.

    Shapes:  meta [n, H, num_groups, D or T];  returns a tensor that broadcasts with [n, H, T, D]
    """
    if side.num_groups == 1:
        return meta if side.axis == "channel" else meta.mT
    if side.axis == "channel":
        return meta.repeat_interleave(side.group, 2)
    return meta.mT.repeat_interleave(side.group, 3)[..., : side.head_dim]
