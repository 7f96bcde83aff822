"""Products with quantized weights in Triton whose tiles are brought by bulk copies, each by one instruction (Hopper).

Few registers hold addresses and few instructions compute them, so that tensor cores and unpacking have both. Codes
become 16-bit floats in registers, as in ``code_tile``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..fusion import FUSED
from ..overlap import begin_in_chain, overlap_options, wait_for_previous, wait_in_chain
from ..product_parts import load_bias, num_splits, store_sums, store_tile, weight_rows
from .code_tile import OVERWRITES, add_splits, finished
from .packed import MAX_SPAN, PackedCodes
from .unpack import minus_zeros, unpack_4_bits, unpack_8_bits

HALF = 64  # columns of a copy: 128 bytes of a row of 16-bit floats, the most that it takes
ALIGNMENT = 16  # bytes, of what is copied


class BulkTuning(NamedTuple):
    """Launch parameters of ``bulk_codes_kernel``.

    ``programs``: that the device runs at once. ``splits``: parts of the columns, at most, of tiles that would leave
    some of them idle.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    splits: int


class TileRange(NamedTuple):
    """``number`` tiles of the weight from ``first`` on, in ``splits`` parts of the columns."""

    first: int
    number: int
    splits: int


@triton.jit(do_not_specialize=["M", "first"])
def bulk_codes_kernel(
    x, codes, scales_ptr, zeros_ptr, bias_ptr, out_ptr, N, M, first,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WAITS: tl.constexpr, SPLITS: tl.constexpr,
    IS_FIRST: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, or with GATED its SwiGLU, of tiles of the weight from the ``first`` on.

    A step takes 128 columns. With SPLITS each program has a part of the columns and leaves sums for
    ``add_splits_kernel``. WAITS: as ``CodeTuning.waits``. IS_FIRST: of the launches of a product.

    Shapes:  x [M, K];  codes [N, 1, bytes], with GATED [N / 2, 2, bytes], a gate's and its up's rows by turns
             scales, zeros [N, GROUPS];  bias [N] or None
             out [M, N], with GATED [M, N / 2], with SPLITS float32 [SPLITS, M, the grid's tiles BLOCK_N]
    Grid:    (tiles of BLOCK_N, cdiv(M, BLOCK_M), SPLITS)
    """
    begin_in_chain(IS_FIRST, OVERLAP)
    wait_in_chain(IS_FIRST, OVERLAP)
    DTYPE: tl.constexpr = x.dtype
    HALF: tl.constexpr = 64
    PART: tl.constexpr = K // (2 * HALF) // SPLITS
    SCALED: tl.constexpr = KIND == "int4" and GROUPS > 1
    i_p, i_m = first + tl.program_id(0), tl.program_id(1) * BLOCK_M
    o_n = weight_rows(i_p, N, GATED, False, BLOCK_N)
    o_scale = o_n * GROUPS
    i_row = i_p * (BLOCK_N // 2 if GATED else BLOCK_N)
    start = tl.program_id(2) * PART
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.range(start, start + PART, num_stages=STAGES):
        i_k = i * (2 * HALF)
        b_x, b_more = x.load([i_m, i_k]), x.load([i_m, i_k + HALF])
        if KIND == "int4":
            b_scale, b_minus = None, None
            if SCALED:
                b_scale = tl.expand_dims(tl.load(scales_ptr + o_scale + i_k // GROUP).to(DTYPE), -1)
            if zeros_ptr is not None:
                b_minus = tl.expand_dims(minus_zeros(tl.load(zeros_ptr + o_scale + i_k // GROUP), DTYPE), -1)
            b_codes = codes.load([i_row, 0, i * HALF]).reshape(BLOCK_N, HALF)
            b_low, b_high = unpack_4_bits(b_codes, b_minus, b_scale, DTYPE, ASM)
        else:
            b_low = unpack_8_bits(codes.load([i_row, 0, i_k]).reshape(BLOCK_N, HALF), KIND, DTYPE, ASM)
            b_high = unpack_8_bits(codes.load([i_row, 0, i_k + HALF]).reshape(BLOCK_N, HALF), KIND, DTYPE, ASM)
        b_acc = tl.dot(b_low, tl.trans(b_x), b_acc)
        b_acc = tl.dot(b_high, tl.trans(b_more), b_acc)
        if WAITS and ASM:
            b_acc = finished(b_acc)
    if not SCALED:
        b_acc *= tl.load(scales_ptr + o_scale).to(tl.float32)[:, None]
    o_m = i_m + tl.arange(0, BLOCK_M)
    if not IS_FIRST:
        wait_for_previous(OVERLAP)
    if SPLITS > 1:
        store_sums(b_acc, out_ptr, tl.program_id(0), tl.num_programs(0), o_m, o_m < M, M)
    else:
        store_tile(b_acc, load_bias(bias_ptr, o_n), out_ptr, i_p, o_m, o_m < M, N, GATED)


def can_copy(x: Tensor, weight: PackedCodes) -> bool:
    """Whether ``multiply_codes`` takes the operands: steps are whole, and have one scale a row of 4-bit codes."""
    size, is_int4 = weight.num_columns, weight.kind == "int4"
    is_whole = weight.kind != "float8" and size % MAX_SPAN == 0 and (weight.span == MAX_SPAN or not is_int4)
    has_groups = weight.group % MAX_SPAN == 0 and (is_int4 or weight.group == size)
    operands = x, weight.codes
    return is_whole and has_groups and all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in operands)


def multiply_codes(
    x: Tensor, weight: PackedCodes, bias: Tensor | None, out: Tensor, tuning: BulkTuning, *, gated: bool
) -> None:
    """Writes ``x @ weight.T + bias`` [M, O], or with ``gated`` its SwiGLU [M, O / 2], to ``out``."""
    (num_rows, size), num_out = x.shape, len(weight.codes)
    operands = describe_rows(x, tuning), describe_codes(weight.codes, tuning, gated=gated)
    for tiles in tile_ranges(tuning, num_rows, num_out, size):
        to, splits = out, tiles.splits
        if splits > 1:
            to = out.new_empty(splits, num_rows, tiles.number * tuning.block_n, dtype=torch.float32)
        constexprs = bulk_variant(weight, tuning, tiles, gated=gated)
        grid = (tiles.number, triton.cdiv(num_rows, tuning.block_m), splits)
        bulk_codes_kernel[grid](
            *operands, weight.scales, weight.zeros, bias, to, num_out, num_rows, tiles.first,
            **constexprs, num_warps=tuning.num_warps, **overlap_options(x.device), **FUSED,
        )  # fmt: skip
        if splits > 1:
            add_splits(to, bias, out, gated=gated, first=tiles.first * tuning.block_n // (1 + gated))


def tile_ranges(tuning: BulkTuning, num_rows: int, num_out: int, size: int) -> Iterator[TileRange]:
    """Whole tiles while they fill all places of the device, then the rest, in splits that fill them."""
    tiles = triton.cdiv(num_out, tuning.block_n)
    places = max(1, tuning.programs // triton.cdiv(num_rows, tuning.block_m))
    rest = tiles % places
    splits = num_splits(tuning.splits, max(1, rest), size // MAX_SPAN, places)
    whole = tiles if splits == 1 else tiles - rest
    if whole:
        yield TileRange(0, whole, 1)
    if whole < tiles:
        yield TileRange(whole, rest, splits)


def bulk_variant(weight: PackedCodes, tuning: BulkTuning, tiles: TileRange, *, gated: bool) -> dict[str, Any]:
    """Compile-time arguments of ``bulk_codes_kernel``."""
    blocks = {"BLOCK_M": tuning.block_m, "BLOCK_N": tuning.block_n, "STAGES": tuning.num_stages}
    found = {name: value for name, value in weight.constexprs.items() if name not in ("SPAN", "BLOCKS")}
    found |= {"GATED": gated, "SPLITS": tiles.splits, "IS_FIRST": tiles.first == 0, "WAITS": OVERWRITES}
    return found | blocks


def describe_rows(x: Tensor, tuning: BulkTuning) -> TensorDescriptor:
    """``x`` for copies of a tile's rows."""
    return TensorDescriptor.from_tensor(x, [tuning.block_m, HALF])


def describe_codes(codes: Tensor, tuning: BulkTuning, *, gated: bool) -> TensorDescriptor:
    """Codes of a weight for copies of a tile's rows."""
    (num_out, size), sides = codes.shape, 1 + gated
    strides = [size, num_out // sides * size, 1]
    return TensorDescriptor(codes, [num_out // sides, sides, size], strides, [tuning.block_n // sides, sides, HALF])
