"""Products with quantized weights on a GPU: the kernel, and its launch parameters, by the number of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..fusion import FUSED
from ..nvidia import has_large_shared, is_hopper
from ..overlap import overlap_options
from ..product_parts import num_splits, power_of_2_below
from ..swiglu import swiglu
from .bulk import BulkTuning, can_copy, multiply_codes
from .code_sum import code_sum_kernel
from .code_tile import OVERWRITES, add_splits, code_tile_kernel
from .dequantize_kernel import dequantize
from .packed import PackedCodes

SPLIT_PROGRAMS = 528  # four on each multiprocessor of an H200; splits make up to as many


class CodeTuning(NamedTuple):
    """Launch parameters of ``code_tile_kernel``.

    ``slices``: parts of the columns, a warp each; 1: warps share them. ``spans``: spans of a step. ``scaled``:
    elements of 4 bits are scaled in place of the sums of a group. ``splits``: parts of the columns, at most, a program
    each, up to ``programs`` of them. ``waits``: a step ends with a wait for tensor cores that read its registers, where
    the compiler would overwrite them.
    """

    block_m: int
    block_n: int
    slices: int
    spans: int
    num_warps: int
    num_stages: int
    scaled: bool = False
    splits: int = 1
    programs: int = SPLIT_PROGRAMS
    waits: bool = False


class CodeSums(NamedTuple):
    """Launch parameters of ``code_sum_kernel``.

    ``vectors`` of 16 bytes of a row that a warp takes, at least. ``loads`` of a vector that a thread has under way.
    """

    vectors: int
    loads: int


Tuning = CodeTuning | CodeSums  # without bulk copies

# By the bits of a code and the most rows that each serves; beyond the last entry weights are written out.
TUNINGS: dict[int, dict[int, Tuning]] = {
    4: {
        1: CodeSums(vectors=64, loads=16),
        8: CodeTuning(8, 16, 4, 2, 4, 4),
        16: CodeTuning(16, 32, 1, 2, 2, 5, splits=4),
        32: CodeTuning(32, 64, 1, 2, 4, 3, splits=4),
        64: CodeTuning(64, 128, 1, 1, 4, 3, splits=4),
        128: CodeTuning(128, 64, 1, 1, 4, 3, scaled=True, splits=4, waits=True),
        # A multiprocessor holds one.
        256: CodeTuning(128, 128, 1, 1, 8, 3, scaled=True, splits=2, programs=132, waits=True),
    },
    8: {
        1: CodeSums(vectors=64, loads=16),
        8: CodeTuning(8, 16, 4, 1, 4, 4),
        16: CodeTuning(16, 64, 1, 2, 2, 3, splits=4),
        32: CodeTuning(32, 64, 1, 2, 4, 3, splits=4),
        64: CodeTuning(64, 64, 1, 1, 4, 4, splits=4, waits=True),
        256: CodeTuning(128, 64, 1, 1, 4, 3, splits=2, waits=True),
    },
}
# The same of weights that have many rows, where they differ.
WIDE_TUNINGS: dict[int, dict[int, Tuning]] = {
    4: {
        8: CodeTuning(8, 32, 1, 4, 2, 3),
        16: CodeTuning(16, 32, 1, 2, 2, 4),
        64: CodeTuning(64, 128, 1, 1, 4, 3),
    },
    8: {16: CodeTuning(16, 32, 1, 2, 2, 3), 64: CodeTuning(64, 64, 1, 1, 4, 3, waits=True)},
}
WIDE = 16_384
# Of weights so narrow that each tile of theirs has a multiprocessor, if it is large, to itself: splits cost more than
# they bring.
NARROW_TUNINGS: dict[int, dict[int, Tuning]] = {
    4: {8: CodeTuning(8, 16, 4, 4, 4, 3), 16: CodeTuning(16, 32, 4, 2, 4, 4)},
    8: {8: CodeTuning(8, 32, 4, 2, 4, 4), 16: CodeTuning(16, 32, 4, 2, 4, 4)},
}
NARROW = 4096
# Narrow ones of more columns than that, where splits pay.
DEEP_TUNINGS: dict[int, dict[int, Tuning]] = {4: NARROW_TUNINGS[4] | {16: TUNINGS[4][16]}, 8: NARROW_TUNINGS[8]}
# The same on Hopper of more than ``FEW_ROWS``, as measured on an H200; a multiprocessor holds two of them, or one.
BULK_TUNINGS: dict[int, dict[int, BulkTuning]] = {
    4: {
        64: BulkTuning(64, 128, 8, 4, programs=264, splits=8),
        128: BulkTuning(128, 64, 4, 3, programs=264, splits=4),
        256: BulkTuning(128, 128, 8, 3, programs=264, splits=4),
    },
    8: {
        128: BulkTuning(128, 128, 8, 4, programs=132, splits=4),
        256: BulkTuning(256, 128, 8, 3, programs=132, splits=4),
    },
}
FEW_ROWS = {4: 32, 8: 64}
# Of 4 bits and 129 to 256 rows, of a weight with few rows and columns: four splits would cost more than they bring.
SMALL_BULK_TUNING = BulkTuning(128, 64, 4, 3, programs=396, splits=4)
MAX_TILE_ROWS = 256


def linear_integer(x: Tensor, weight: PackedCodes, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """``x @ weight.T + bias``, or with ``gated`` its SwiGLU; the values of codes and all sums in float32.

    Shapes: x [M, I], float16 or bfloat16, contiguous; weight [O, I]; bias [O]; result [M, O], gated [M, O / 2].
    The weight and ``bias`` may be read while the kernel before still runs: that kernel must not write them. A weight of
    4-bit floats is written out.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if len(x) > MAX_TILE_ROWS or weight.kind == "float4":
        out = F.linear(x, dequantize(weight, x.dtype), bias)
        return swiglu(out) if gated else out
    return linear_codes(x, weight, bias, gated=gated)


def linear_codes(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    tuning: Tuning | BulkTuning | None = None,
) -> Tensor:
    """``linear_integer`` by a kernel of ours, columns of ``x`` in the order of the codes.

    ``tuning``: launch parameters, and with them the kernel; ``CodeSums`` serves one row alone.
    """
    num_rows, num_out = len(x), len(weight.codes)
    assert x.is_contiguous() and x.shape[1] == weight.num_columns
    out = x.new_empty(num_rows, num_out // 2 if gated else num_out)
    tuning = tuning or bulk_tuning(x, weight)
    if isinstance(tuning, BulkTuning):
        multiply_codes(x, weight, bias, out, tuning, gated=gated)
        return out
    kernel, constexprs, num_warps = code_variant(weight, num_rows, gated=gated, tuning=tuning)
    launch = {"num_warps": num_warps, **overlap_options(x.device)}
    programs = triton.cdiv(num_out, constexprs["BLOCK_N"])
    if kernel is code_sum_kernel:
        operands = weight.codes.view(torch.int32), weight.scales, weight.zeros, bias
        kernel[(programs,)](x, *operands, out, num_out, **constexprs, **launch, **FUSED)
        return out
    splits = constexprs["SPLITS"]
    to = out if splits == 1 else x.new_empty(splits, num_rows, programs * constexprs["BLOCK_N"], dtype=torch.float32)
    grid = (programs, triton.cdiv(num_rows, constexprs["BLOCK_M"]), splits)
    operands = weight.codes.view(torch.uint8), *weight.group_operands(in_words=not constexprs["SCALED"]), bias
    kernel[grid](x, *operands, to, num_out, num_rows, **constexprs, **launch, **FUSED)
    if splits > 1:
        add_splits(to, bias, out, gated=gated)
    return out


def bulk_tuning(x: Tensor, weight: PackedCodes) -> BulkTuning | None:
    """Launch parameters by bulk copies, where the device has them and they are faster."""
    if not is_hopper(x.device) or not can_copy(x, weight):
        return None
    bits = 4 if weight.kind == "int4" else 8
    most = next((most for most in BULK_TUNINGS[bits] if FEW_ROWS[bits] < len(x) <= most), None)
    if most is None:
        return None
    if most == MAX_TILE_ROWS and len(weight.codes) <= NARROW:
        if bits == 8:  # tiles without copies are faster
            return None
        if weight.num_columns <= NARROW:
            return SMALL_BULK_TUNING
    return BULK_TUNINGS[bits][most]


def code_variant(
    weight: PackedCodes, num_rows: int, *, gated: bool = False, tuning: Tuning | None = None
) -> tuple[Any, dict[str, Any], int]:
    """Kernel, compile-time arguments and warps for ``num_rows``, without bulk copies."""
    if tuning is None:
        tuning = code_tuning(weight, num_rows, large=has_large_shared(weight.codes.device))
    constexprs = weight.constexprs | {"GATED": gated}
    if isinstance(tuning, CodeSums):
        found, num_warps = _sum_variant(weight, tuning)
        return code_sum_kernel, constexprs | found, num_warps
    found, num_warps = _tile_variant(weight, num_rows, tuning)
    return code_tile_kernel, constexprs | found, num_warps


def can_sum(weight: PackedCodes) -> bool:
    """Whether rows of the weight are vectors of 16 bytes."""
    return weight.codes.shape[1] % 16 == 0 and weight.num_columns % 4 == 0


def code_tuning(weight: PackedCodes, num_rows: int, *, large: bool) -> Tuning:
    """Launch parameters without bulk copies; ``large``: see ``has_large_shared``."""
    bits, (num_out, size) = 4 if weight.kind == "int4" else 8, weight.shape
    tunings, least = TUNINGS[bits], num_rows if can_sum(weight) else max(2, num_rows)
    most = min((most for most in tunings if least <= most), default=max(tunings))
    others: dict[int, Tuning] = {}
    if num_out >= WIDE:
        others = WIDE_TUNINGS[bits]
    elif large and num_out <= NARROW:
        others = (DEEP_TUNINGS if size > NARROW else NARROW_TUNINGS)[bits]
    return others.get(most, tunings[most])


def _sum_variant(weight: PackedCodes, tuning: CodeSums) -> tuple[dict[str, Any], int]:
    number = weight.codes.shape[1] // 16
    num_warps = min(8, max(1, power_of_2_below(number // tuning.vectors)))
    rows = tuning.loads // triton.cdiv(number, 32 * num_warps)
    return {"BLOCK_N": min(8, max(2, power_of_2_below(rows))), "BLOCK_Q": 32 * num_warps}, num_warps


def _tile_variant(weight: PackedCodes, num_rows: int, tuning: CodeTuning) -> tuple[dict[str, Any], int]:
    number = triton.cdiv(weight.num_columns, weight.span)
    slices, spans, num_warps = tuning.slices, tuning.spans, tuning.num_warps
    programs = triton.cdiv(weight.shape[0], tuning.block_n) * triton.cdiv(num_rows, tuning.block_m)
    while number % slices or (slices > 1 and weight.num_columns % weight.span):
        slices //= 2
    splits = num_splits(tuning.splits, programs, number // slices, tuning.programs)
    while number // slices // splits % spans:
        spans //= 2
    if tuning.slices > 1:
        num_warps = slices
    constexprs = {
        "BLOCK_N": tuning.block_n,
        "FULL": weight.shape[0] % tuning.block_n == 0,
        "BLOCK_M": tuning.block_m,
        "SLICES": slices,
        "SPANS": spans,
        "STAGES": tuning.num_stages,
        "SCALED": tuning.scaled and weight.kind == "int4" and weight.group < weight.num_columns,
        "SPLITS": splits,
        "WAITS": tuning.waits and OVERWRITES,
    }
    return constexprs, num_warps
