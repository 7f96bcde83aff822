"""Integer codes from a checkpoint's words into containers, and containers of projections into one of stacked rows."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv_engine.kernels.linear import Float4Weight, Float8Weight, IntegerWeight, Weight
from qkv_engine.kernels.linear.codes import BLOCK, FLOAT4_GROUP, ZERO_4_BIT

from .format import WeightFormat

Containers = IntegerWeight | Float8Weight | Float4Weight
STREAMED_ROWS = 4096  # of a weight that is quantized while it is read, at a time


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes uint8 [A, B * 32 / bits] of words int32 [A, B]: the lowest bits come first, or code ``order[i]`` i-th."""
    as_bytes = words.contiguous().view(torch.uint8)  # little-endian
    codes = as_bytes if bits == 8 else torch.stack((as_bytes & 15, as_bytes >> 4), dim=-1).flatten(1)
    if order is None:
        return codes
    return codes.view(len(codes), -1, len(order))[:, :, list(order)].flatten(1)


def pack_halves(codes: Tensor) -> Tensor:
    """Codes [O, I] of 4 bits as the bytes of an ``IntegerWeight``."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def integer_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, dtype: torch.dtype, order: Tensor | None = None
) -> IntegerWeight:
    """The container of unsigned ``codes`` [O, I], scales [O, I / group] and zeros, ``None`` where half is zero."""
    scales = scales.to(dtype).contiguous()
    if bits == 8:
        assert zeros is None, "refused before"
        return IntegerWeight((codes ^ 128).view(torch.int8).contiguous(), scales, None, order)
    return IntegerWeight(pack_halves(codes), scales, None if zeros is None else zeros.contiguous(), order)


def empty_integers(
    rows: int, columns: int, bits: int, group: int | None, dtype: torch.dtype, *, zeros: bool, order: bool
) -> IntegerWeight:
    """A container without values; without ``group`` a row has one scale."""
    groups = columns // (group or columns)
    stored = torch.empty(rows, columns, dtype=torch.int8)
    if bits == 4:
        stored = torch.empty(rows, columns // 2, dtype=torch.uint8)
    return IntegerWeight(
        stored,
        torch.empty(rows, groups, dtype=dtype),
        torch.empty(rows, groups, dtype=torch.uint8) if zeros else None,
        torch.empty(columns, dtype=torch.int32) if order else None,
    )


def empty_float8(rows: int, columns: int, *, blocks: bool) -> Float8Weight:
    """A container without values."""
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if blocks else (rows, 1)
    return Float8Weight(torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(shape))


def empty_float4(rows: int, columns: int) -> Float4Weight:
    """A container without values."""
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    return Float4Weight(codes, torch.empty(rows, columns // FLOAT4_GROUP, dtype=torch.uint8))


def row_tensors(weight: Weight) -> list[Tensor]:
    """The tensors of a weight that have its rows; a permutation of rows is one of each of theirs."""
    if isinstance(weight, Float4Weight):
        return list(weight)
    if isinstance(weight, IntegerWeight):
        return [each for each in weight[:3] if each is not None]
    if isinstance(weight, Float8Weight):
        return [weight.codes.view(torch.uint8), *([] if weight.is_blockwise else [weight.scales])]
    assert isinstance(weight, Tensor), "asked for before packing"
    return [weight]


def put_rows(target: Weight, start: int, part: Weight) -> bool:
    """Copies ``part`` to rows of ``target`` from ``start`` on; false if they cannot stand in one container.

    The order of columns is one for all rows, and a block of rows belongs to one part.
    """
    assert isinstance(target, Containers) and isinstance(part, Containers), "plain and packed weights are no containers"
    stop = start + part.shape[0]
    if isinstance(target, Float4Weight):
        target.codes[start:stop], target.scales[start:stop] = part.codes, part.scales
        return True
    target.codes[start:stop].view(torch.uint8).copy_(part.codes.view(torch.uint8))
    if isinstance(target, Float8Weight):
        assert isinstance(part, Float8Weight)
        if not target.is_blockwise:
            target.scales[start:stop] = part.scales
            return True
        target.scales[start // BLOCK : start // BLOCK + len(part.scales)] = part.scales
        return start % BLOCK == 0
    assert isinstance(part, IntegerWeight)
    target.scales[start:stop] = part.scales
    if target.zeros is not None:
        target.zeros[start:stop] = ZERO_4_BIT if part.zeros is None else part.zeros
    if target.order is None or part.order is None:
        return True
    if start == 0:
        target.order.copy_(part.order)
    return torch.equal(target.order, part.order.to(target.order.device))


def quantized(each: WeightFormat, matrix: Tensor, dtype: torch.dtype) -> Weight:
    """The plain ``matrix`` [O, I] in a streamed format, for activations of ``dtype``."""
    with torch.device(matrix.device):
        target = each.empty(len(matrix), matrix.shape[1], dtype)
    for start in range(0, len(matrix), STREAMED_ROWS):
        put_rows(target, start, each.build({"weight": matrix[start : start + STREAMED_ROWS]}, dtype))
    return target
