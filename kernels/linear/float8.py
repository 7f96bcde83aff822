"""Products with weights of 8-bit floats on a GPU: of many rows by the tensor cores for such floats."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..fusion import FUSED
from ..nvidia import is_hopper, is_nvidia
from ..overlap import overlap_options
from ..product_parts import num_splits
from ..swiglu import swiglu
from .code_tile import add_splits
from .codes import BLOCK
from .float8_rows import Float8Rows, quantize_rows, swiglu_rows
from .float8_tile import float8_bulk_kernel, float8_tile_kernel
from .integer import SPLIT_PROGRAMS, linear_integer
from .packed import PackedCodes

MIN_ROWS = 2  # one row is read as fast with 16-bit activations
MIN_BLOCK_ROWS = 65  # the same, of torch's product of blocks
ALIGNMENT = 16  # rows and columns of the weight are multiples of it


class Float8Tuning(NamedTuple):
    """Launch parameters of ``float8_tile_kernel``; ``splits``: as in ``CodeTuning``."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1
    block_k: int = 128


# By the most rows that each serves; beyond the last entry torch's product is faster.
TUNINGS = {
    16: Float8Tuning(16, 64, 4, 3, splits=2, block_k=256),
    32: Float8Tuning(32, 64, 4, 3, splits=2, block_k=256),
    64: Float8Tuning(64, 64, 4, 4, splits=2),
    128: Float8Tuning(128, 64, 4, 4, splits=2),
    256: Float8Tuning(128, 128, 8, 4, splits=2),
}
# The same by bulk copies on Hopper, of more rows than ``MAX_ROWS`` without SwiGLU, by the most rows of the weight: each
# program has a multiprocessor to itself.
BULK_TUNINGS = {4096: Float8Tuning(128, 64, 4, 6), 8192: Float8Tuning(128, 128, 8, 5)}
MAX_ROWS = 128  # of any weight; up to the last entry of one with so few rows that torch's tiles leave processors idle
FEW_OUT = 4096


@cache
def has_float8(device: torch.device, *, blocks: bool = False) -> bool:
    """Whether the device has tensor cores for 8-bit floats, and torch's product of ``blocks``."""
    if not is_nvidia(device):
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability == (9, 0) if blocks else capability >= (8, 9)


def linear_float8(x: Tensor, weight: PackedCodes, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """As ``linear_integer``; activations of many rows are quantized, too, where the device multiplies 8-bit floats."""
    if not can_scale(x, weight):
        return linear_integer(x, weight, bias, gated=gated)
    rows = quantize_rows(x, blocks=weight.is_blockwise)
    if _has_tiles(rows, weight, gated=gated):
        return scaled_tiles(rows, weight, bias, gated=gated)
    out = scaled_product(rows, weight, bias)
    return swiglu(out) if gated else out


def linear_rows(x: Float8Rows, weight: PackedCodes, bias: Tensor | None = None) -> Tensor:
    """``linear_float8`` of rows that are quantized already; bfloat16 [M, O]."""
    has_tiles = _has_tiles(x, weight, gated=False)
    return scaled_tiles(x, weight, bias) if has_tiles else scaled_product(x, weight, bias)


def linear_rows_gated(
    x: Float8Rows, weight: PackedCodes, bias: Tensor | None = None, reader: PackedCodes | None = None
) -> Tensor | Float8Rows:
    """``linear_rows`` with SwiGLU, [M, O / 2]; in 8-bit floats where ``reader`` takes them and a kernel is saved."""
    if _has_tiles(x, weight, gated=True):
        return scaled_tiles(x, weight, bias, gated=True)
    out = scaled_product(x, weight, bias)
    return swiglu_rows(out) if reader is not None and takes_rows(out, reader) else swiglu(out)


def _has_tiles(x: Float8Rows, weight: PackedCodes, *, gated: bool) -> bool:
    """Whether ``scaled_tiles`` are as fast as torch's product."""
    if bulk_tuning(x, weight, gated=gated) is not None:
        return True
    most = max(TUNINGS) if len(weight.codes) <= FEW_OUT else MAX_ROWS
    return len(x.codes) <= most and not weight.is_blockwise


def can_scale(x: Tensor, weight: PackedCodes) -> bool:
    """Whether products of 8-bit floats take the operands, and are worth it."""
    num_out, size = weight.shape
    if weight.is_blockwise:
        is_aligned, least = num_out % BLOCK == 0 and size % (4 * BLOCK) == 0, MIN_BLOCK_ROWS
    else:
        is_aligned, least = num_out % ALIGNMENT == 0 and size % ALIGNMENT == 0, MIN_ROWS
    has_units = has_float8(x.device, blocks=weight.is_blockwise)
    return len(x) >= least and x.dtype is torch.bfloat16 and is_aligned and has_units


def takes_rows(x: Tensor, weight: PackedCodes) -> bool:
    """Whether the product of ``x`` and ``weight`` is that of rows with a scale each."""
    return weight.kind == "float8" and not weight.is_blockwise and can_scale(x, weight)


def scaled_product(x: Float8Rows, weight: PackedCodes, bias: Tensor | None = None) -> Tensor:
    """The product by torch, bfloat16 [M, O]."""
    codes, scales = weight.codes.T, weight.scales.T
    if not weight.is_blockwise:
        return torch._scaled_mm(x.codes, codes, x.scales, scales, bias, None, torch.bfloat16, use_fast_accum=True)
    of_x, of_weight = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(x.codes, codes, x.scales, of_x, scales, of_weight, output_dtype=torch.bfloat16)
    return out if bias is None else out.add_(bias)


def scaled_tiles(
    x: Float8Rows,
    weight: PackedCodes,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    tuning: Float8Tuning | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product by a kernel of ours, [M, O], or with ``gated`` its SwiGLU, [M, O / 2].

    ``tuning``: launch parameters of ``float8_tile_kernel``, which computes it then.
    """
    num_rows, num_out = len(x.codes), len(weight.codes)
    if tuning is None and (bulk := bulk_tuning(x, weight, gated=gated)):
        out = x.codes.new_empty(num_rows, num_out, dtype=dtype)
        multiply_rows(x, weight, bias, out, bulk)
        return out
    constexprs, num_warps = scaled_variant(weight, num_rows, gated=gated, tuning=tuning)
    splits, overlap = constexprs["SPLITS"], overlap_options(x.codes.device)
    out = x.codes.new_empty(num_rows, num_out // 2 if gated else num_out, dtype=dtype)
    programs, width = triton.cdiv(num_out, constexprs["BLOCK_N"]), constexprs["BLOCK_N"]
    to = out if splits == 1 else out.new_empty(splits, num_rows, programs * width, dtype=torch.float32)
    grid = (programs, triton.cdiv(num_rows, constexprs["BLOCK_M"]), splits)
    operands = x.codes, x.scales, weight.codes, weight.scales, bias, to, num_out, num_rows
    float8_tile_kernel[grid](*operands, **constexprs, num_warps=num_warps, **overlap, **FUSED)
    if splits > 1:
        add_splits(to, bias, out, gated=gated)
    return out


def bulk_tuning(x: Float8Rows, weight: PackedCodes, *, gated: bool) -> Float8Tuning | None:
    """Launch parameters of ``multiply_rows`` where it takes the operands and is faster."""
    is_plain = not (gated or weight.is_blockwise or weight.num_columns % BLOCK)
    if not is_plain or not is_hopper(x.codes.device) or not MAX_ROWS < len(x.codes) <= max(TUNINGS):
        return None
    return next((tuning for most, tuning in BULK_TUNINGS.items() if len(weight.codes) <= most), None)


def multiply_rows(x: Float8Rows, weight: PackedCodes, bias: Tensor | None, out: Tensor, tuning: Float8Tuning) -> None:
    """Writes the product [M, O] to ``out`` by ``float8_bulk_kernel``; columns are a multiple of 128."""
    (num_rows, size), num_out = x.codes.shape, len(weight.codes)
    rows = TensorDescriptor.from_tensor(x.codes, [tuning.block_m, BLOCK])
    codes = TensorDescriptor.from_tensor(weight.codes, [tuning.block_n, BLOCK])
    blocks = {"BLOCK_M": tuning.block_m, "BLOCK_N": tuning.block_n, "STAGES": tuning.num_stages}
    grid = triton.cdiv(num_rows, tuning.block_m), triton.cdiv(num_out, tuning.block_n)
    operands = rows, codes, x.scales, weight.scales, bias, out, num_out, num_rows
    options = {"num_warps": tuning.num_warps, **overlap_options(out.device)}
    float8_bulk_kernel[grid](*operands, K=size, **blocks, **options, **FUSED)


def scaled_variant(
    weight: PackedCodes, num_rows: int, *, gated: bool = False, tuning: Float8Tuning | None = None
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for ``num_rows``."""
    if tuning is None:
        tuning = TUNINGS[min((most for most in TUNINGS if num_rows <= most), default=max(TUNINGS))]
    num_out, size = weight.shape
    programs = triton.cdiv(num_out, tuning.block_n) * triton.cdiv(num_rows, tuning.block_m)
    constexprs = {
        "K": size,
        "BLOCKS": weight.is_blockwise,
        "GATED": gated,
        "FULL": num_out % tuning.block_n == 0,
        "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n,
        "BLOCK_K": tuning.block_k,
        "STAGES": tuning.num_stages,
        "SPLITS": num_splits(tuning.splits, programs, triton.cdiv(size, tuning.block_k), SPLIT_PROGRAMS),
    }
    return constexprs, tuning.num_warps
