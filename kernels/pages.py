"""Page sides as torch tensors: their bytes to and from a block slot, their metadata to and from bytes."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .bits import mask_planes, pack, planes, unpack
from .layout import DenseSide, Side, UniformSide


def gather(memory: Tensor, addresses: Tensor, nbytes: int) -> Tensor:
    """Copies of ``nbytes`` bytes of the arena from each address.

    Shapes:  memory [M] uint8;  addresses [n] int64, multiples of 16;  returns [n, nbytes] uint8
    """
    words = memory.view(torch.int64)
    # One overlapping row for every 16-byte position, so that a single index_select copies whole runs of bytes.
    num_rows = (memory.numel() - nbytes) // 16 + 1
    rows = words.as_strided((num_rows, nbytes // 8), (2, 1))
    return rows.index_select(0, addresses >> 4).view(torch.uint8)


def even_runs(members: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Splits pairs of offsets into runs in which both grow in even steps, so that a run is two strided views."""
    runs: list[list[tuple[int, int]]] = []
    for a, b in members:
        run = runs[-1] if runs else []
        if len(run) == 1 or (run and (a - run[-1][0], b - run[-1][1]) == _step(run)):
            run.append((a, b))
        else:
            runs.append([(a, b)])
    return runs


def _step(run: list[tuple[int, int]]) -> tuple[int, int]:
    return run[1][0] - run[0][0], run[1][1] - run[0][1]


def run_rows(
    memory: Tensor, src: int, dst: int, run: list[tuple[int, int]], old: Side, new: Side
) -> tuple[Tensor, ...]:
    """The sides of a run in the blocks at ``src`` and ``dst`` as views [n, nbytes] uint8 of the arena."""
    steps = _step(run) if len(run) > 1 else (0, 0)
    return tuple(
        memory[address + first :].as_strided((len(run), side.nbytes), (step, 1))
        for address, first, side, step in zip((src, dst), run[0], (old, new), steps, strict=True)
    )


def read_dense(rows: Tensor, side: DenseSide) -> Tensor:
    """Shapes:  rows [n, nbytes] uint8;  returns [n, H, T, D] in the side's dtype, a view"""
    shape = (len(rows), side.num_kv_heads, side.num_tokens, side.head_dim)
    return rows.view(side.dtype).view(shape)


def packed_codes(rows: Tensor, side: UniformSide) -> Tensor:
    """Shapes:  rows [n, nbytes] uint8;  returns [n, H, T * bits / 8 * D] uint8, a view"""
    return rows[:, : side.meta_offset].view(len(rows), side.num_kv_heads, -1)


def read_codes(rows: Tensor, side: UniformSide) -> Tensor:
    """Shapes:  rows [n, nbytes] uint8;  returns codes [n, H, T, D] uint8"""
    return unpack(packed_codes(rows, side), side.bits, side.side, side.num_tokens)


def code_planes(rows: Tensor, side: UniformSide, offset: int = 0) -> Tensor:
    """The codes plane by plane, still in their place in a byte: see ``bits.planes``. One view where it can be.

    Shapes:  rows [n, ...] uint8, the side from byte ``offset`` on, in even steps;  returns
             K [n, H, planes, lanes, D] or V [n, H, planes, D, lanes], uint8
    """
    if side.bits == 3:
        return planes(packed_codes(rows[:, offset:], side), side.bits, side.side, side.num_tokens)
    lanes = side.num_tokens * side.bits // 8
    tile = (lanes, side.head_dim) if side.side == "k" else (side.head_dim, lanes)
    shape, steps = (len(rows), side.num_kv_heads, 1, *tile), (rows.stride(0), side.head_codes_nbytes, 0, tile[1], 1)
    return mask_planes(rows.as_strided(shape, steps, rows.storage_offset() + offset), side.bits)


@lru_cache
def token_factors(bits: int, num_tokens: int) -> Tensor:
    """What makes codes of ``code_planes`` shares of the range: 1 / (2^bits - 1), times 2^(-bits p) in plane p: [T]."""
    num_planes = 1 if bits == 3 else 8 // bits
    shifts = torch.arange(num_planes).repeat_interleave(num_tokens // num_planes) * bits
    return 1 / ((2**bits - 1) * 2.0**shifts)


def meta_tile(rows: Tensor, side: UniformSide, offset: int = 0) -> Tensor:
    """(min, range) of every group, a view to read or write.

    Shapes:  rows [n, ...] uint8, the side from byte ``offset`` on, in even steps;  returns fp16, by axis,
             channel [2, n, H, num_groups, D] or token [2, n, H, num_groups, meta_planes, meta_lanes]
    """
    words, across = rows.view(torch.float16), side.head_dim if side.axis == "channel" else side.num_tokens
    heads, strides = (len(rows), side.num_kv_heads), (words.stride(0), side.head_meta_nbytes // 2)
    start = words.storage_offset() + (offset + side.meta_offset) // 2
    if side.axis == "channel":
        shape, inner = (2, *heads, side.num_groups, across), (side.num_groups * across, *strides, across, 1)
        return words.as_strided(shape, inner, start)
    tile, lanes = (2, *heads, side.num_groups, side.meta_planes, side.meta_lanes), 2 * side.meta_planes
    return words.as_strided(tile, (1, *strides, 2 * across, 2, lanes), start)


def read_meta(rows: Tensor, side: UniformSide) -> Tensor:
    """(min, range) of every group, as stored.

    Shapes:  rows [n, nbytes] uint8;  returns [2, n, H, num_groups, D or T] fp16, by axis channel or token
    """
    tile = meta_tile(rows, side)
    return tile if side.axis == "channel" else tile.flatten(-2)


def tops(rows: Tensor, side: UniformSide) -> Tensor:
    """The largest range of each head, a view [n, H] fp16."""
    return rows[:, side.top_offset : side.top_offset + 2 * side.num_kv_heads].view(torch.float16)


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
