"""Products with quantized weights on a GPU: the kernel, and its launch parameters, by the number of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..fusion import FUSED
from ..overlap import overlap_options
from ..swiglu import swiglu
from .code_tile import add_splits_kernel, code_tile_kernel
from .dequantize import dequantize
from .packed import PackedCodes


class CodeTuning(NamedTuple):
    """Launch parameters of ``code_tile_kernel``.

    ``slices``: parts of the columns, a warp each; 1: warps share them. ``spans``: spans of a step. ``ahead``: lines of
    a slice of a row that are asked for before the kernel before has ended. ``scaled``: elements of 4 bits are scaled in
    place of the sums of a group. ``splits``: parts of the columns, at most, a program each, where programs are few and
    there is no gate.
    """

    block_m: int
    block_n: int
    slices: int
    spans: int
    num_warps: int
    num_stages: int
    ahead: int = 0
    scaled: bool = False
    splits: int = 1


# By the bits of a code and the most rows that each serves; beyond the last entry weights are written out.
TUNINGS: dict[int, dict[int, CodeTuning]] = {
    4: {
        8: CodeTuning(8, 32, 4, 2, 4, 3),
        16: CodeTuning(16, 32, 4, 2, 4, 3),
        32: CodeTuning(32, 64, 1, 1, 4, 4, splits=4),
        64: CodeTuning(64, 64, 1, 1, 4, 4, splits=4),
        512: CodeTuning(128, 128, 1, 1, 8, 3, scaled=True, splits=4),
    },
    8: {
        8: CodeTuning(8, 32, 4, 1, 4, 4),
        16: CodeTuning(16, 32, 4, 1, 4, 4),
        32: CodeTuning(32, 64, 1, 1, 4, 4, splits=4),
        64: CodeTuning(64, 64, 1, 1, 4, 4, splits=4),
        512: CodeTuning(128, 128, 1, 1, 8, 3, scaled=True, splits=4),
    },
}
MAX_TILE_ROWS = 512
SPLIT_PROGRAMS = 264  # two on each multiprocessor of an H200; splits make up to as many
ADD_TILE = 1024  # elements of a program that adds splits


def linear_integer(x: Tensor, weight: PackedCodes, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """``x @ weight.T + bias``, or with ``gated`` its SwiGLU; the values of codes and all sums in float32.

    Shapes: x [M, I], float16 or bfloat16, contiguous; weight [O, I]; bias [O]; result [M, O], gated [M, O / 2].
    The weight and ``bias`` may be read while the kernel before still runs: that kernel must not write them.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if len(x) <= MAX_TILE_ROWS:
        return linear_tiles(x, weight, bias, gated=gated)
    out = F.linear(x, dequantize(weight, x.dtype), bias)
    return swiglu(out) if gated else out


def linear_tiles(
    x: Tensor, weight: PackedCodes, bias: Tensor | None = None, *, gated: bool = False, tuning: CodeTuning | None = None
) -> Tensor:
    """``linear_integer`` by ``code_tile_kernel``, columns of ``x`` in the order of the codes."""
    num_rows, num_out = len(x), len(weight.codes)
    assert x.is_contiguous() and x.shape[1] == weight.num_columns
    constexprs, num_warps = tile_variant(weight, num_rows, gated=gated, tuning=tuning)
    splits = constexprs["SPLITS"]
    out = x.new_empty(num_rows, num_out // 2 if gated else num_out)
    to = out if splits == 1 else x.new_empty(splits, num_rows, num_out, dtype=torch.float32)
    grid = (triton.cdiv(num_out, constexprs["BLOCK_N"]), triton.cdiv(num_rows, constexprs["BLOCK_M"]), splits)
    operands = x, weight.codes.view(torch.uint8), weight.scales, weight.zeros, bias, to, num_out, num_rows
    options = overlap_options(x.device) | FUSED
    code_tile_kernel[grid](*operands, **constexprs, num_warps=num_warps, **options)
    if splits > 1:
        constexprs = {"N": num_out, "SPLITS": splits, "TILE": ADD_TILE}
        add_splits_kernel[(triton.cdiv(out.numel(), ADD_TILE),)](to, bias, out, out.numel(), **constexprs, **options)
    return out


def tile_variant(
    weight: PackedCodes, num_rows: int, *, gated: bool = False, tuning: CodeTuning | None = None
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for ``num_rows``."""
    if tuning is None:
        tunings = TUNINGS[4 if weight.kind == "int4" else 8]
        tuning = tunings[min((most for most in tunings if num_rows <= most), default=max(tunings))]
    number = triton.cdiv(weight.num_columns, weight.span)
    slices, spans, num_warps = tuning.slices, tuning.spans, tuning.num_warps
    programs = triton.cdiv(weight.shape[0], tuning.block_n) * triton.cdiv(num_rows, tuning.block_m)
    splits = 1 if gated or programs > SPLIT_PROGRAMS // 2 else min(tuning.splits, SPLIT_PROGRAMS // programs)
    while number % slices:
        slices //= 2
    while number // slices % splits:
        splits -= 1
    while number // slices // splits % spans:
        spans //= 2
    if tuning.slices > 1:
        num_warps = slices
    constexprs = {"GATED": gated, "FULL": weight.shape[0] % tuning.block_n == 0, "BLOCK_M": tuning.block_m}
    constexprs |= {"BLOCK_N": tuning.block_n, "SLICES": slices, "SPANS": spans, "STAGES": tuning.num_stages}
    constexprs["SCALED"] = tuning.scaled and weight.kind == "int4" and weight.group < weight.num_columns
    constexprs["SPLITS"] = splits
    lines = weight.codes.shape[1] // slices // splits // 128
    constexprs["AHEAD"] = min(tuning.ahead, 1 << lines.bit_length() >> 1)
    return weight.constexprs | constexprs, num_warps
