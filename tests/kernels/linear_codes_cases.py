"""Cases of products with quantized weights for Triton's interpreter: the largest error, of what rounding allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product as product_of
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine.kernels.linear import codes_reference
from qkv_engine.kernels.linear.bulk import BulkTuning
from qkv_engine.kernels.linear.codes import BLOCK, Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.dequantize_kernel import dequantize
from qkv_engine.kernels.linear.float8 import Float8Tuning, multiply_rows, scaled_tiles
from qkv_engine.kernels.linear.float8_rows import Float8Rows, quantize_rows, swiglu_rows
from qkv_engine.kernels.linear.integer import (
    CodeSums,
    CodeTuning,
    Tuning,
    linear_codes,
    linear_integer,
)
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.rms_norm.triton import rms_norm_float8, rms_norm_triton
from qkv_engine.kernels.swiglu.triton import swiglu_triton

from .fused_cases import DTYPES, fenced
from .interpreted import report

SUM_UNIT = 2.0**-20  # of the sum of the products' sizes: some additions in float32
TILES: dict[str, Tuning] = {
    "warps share columns": CodeTuning(block_m=8, block_n=64, slices=1, spans=2, num_warps=4, num_stages=3),
    "sums": CodeSums(vectors=16, loads=4),
    "slices": CodeTuning(block_m=16, block_n=32, slices=2, spans=1, num_warps=2, num_stages=2),
    "splits": CodeTuning(block_m=32, block_n=32, slices=1, spans=2, num_warps=2, num_stages=2, splits=2),
    "large tiles": CodeTuning(block_m=64, block_n=64, slices=1, spans=1, num_warps=4, num_stages=2),
}
BULK = {  # of 83 rows of the weight
    "bulk whole": BulkTuning(16, 32, 4, 2, programs=9, splits=2),
    "bulk splits": BulkTuning(64, 64, 4, 2, programs=8, splits=4),
    "bulk rest in splits": BulkTuning(64, 32, 4, 3, programs=2, splits=2),
}
FLOAT8 = {
    "tiles": Float8Tuning(block_m=64, block_n=64, num_warps=4, num_stages=3),
    "splits": Float8Tuning(block_m=16, block_n=32, num_warps=2, num_stages=2, splits=2),
}


def integer_weight(
    num_out: int, size: int, bits: int, group: int, dtype: torch.dtype, *, zeros: bool = False, order: bool = False
) -> IntegerWeight:
    """Random codes, the largest and smallest among them."""
    low, high, kind, width = (-128, 128, torch.int8, size) if bits == 8 else (0, 256, torch.uint8, size // 2)
    scales = fenced(num_out, size // group, dtype=dtype)[0].abs_().add_(0.5)
    return IntegerWeight(
        torch.randint(low, high, (num_out, width), dtype=kind),
        scales,
        torch.randint(0, 16, (num_out, size // group), dtype=torch.uint8) if zeros else None,
        torch.randperm(size, dtype=torch.int32) if order else None,
    )


def float8_weight(num_out: int, size: int, *, blocks: bool = False) -> Float8Weight:
    """Random codes of all sizes, subnormal ones among them."""
    codes = torch.randint(0, 0x7F, (num_out, size), dtype=torch.uint8) | torch.randint(0, 2, (num_out, size)) << 7
    shape = (-(-num_out // 128), -(-size // 128)) if blocks else (num_out, 1)
    return Float8Weight(codes.to(torch.uint8).view(torch.float8_e4m3fn), torch.rand(shape) + 0.5)


def product(
    weight: IntegerWeight | Float8Weight,
    num_rows: int,
    dtype: torch.dtype,
    call: Callable[..., Tensor],
    bias: bool = False,
    **options: Any,
) -> float:
    """NaNs lie around the operands and in the result before it is written."""
    num_out, size = weight.shape
    biases = fenced(num_out, dtype=dtype)[0] if bias else None
    x = fenced(num_rows, size, dtype=dtype)[0]
    packed = pack(weight)
    with patch.object(torch.Tensor, "new_empty", _filled), patch.object(torch, "empty", _filled_anew):
        found = call(x, packed, biases, **options)
    assert found.shape == (num_rows, num_out) and found.dtype == dtype
    return error(found, x, weight, biases)


def error(found: Tensor, x: Tensor, weight: IntegerWeight | Float8Weight, bias: Tensor | None) -> float:
    """Largest difference from the product in float64, of half a rounding of the result and ``SUM_UNIT``."""
    exact = codes_reference.linear(x.double(), weight, bias)
    values = codes_reference.dequantize(weight).double().abs()
    size = x.double().abs() @ values.T + (0 if bias is None else bias.double().abs())
    allowed = torch.finfo(found.dtype).eps / 2 * exact.abs() + SUM_UNIT * size
    return float(((found.double() - exact).abs() / allowed).max())


def with_powers(weight: IntegerWeight) -> IntegerWeight:
    """Scales are powers of two, so that scaled elements have no roundings of their own; float16 holds the sums."""
    return weight._replace(scales=(2.0 ** (weight.scales.float().log2().round() - 4)).to(weight.scales.dtype))


def gated(weight: IntegerWeight | Float8Weight, num_rows: int, call: Callable[..., Tensor] = linear_integer) -> float:
    """The bits of the product, then SwiGLU."""
    num_out, size = weight.shape
    bias, x = torch.randn(num_out).bfloat16(), torch.randn(num_rows, size).bfloat16() / 64
    packed = pack(weight)
    with patch.object(torch.Tensor, "new_empty", _filled):
        expected = swiglu_triton(call(x, packed, bias))
        return float(not torch.equal(call(x, packed, bias, gated=True), expected))


def scaled_rows(num_out: int, size: int, num_rows: int) -> float:
    """The error of products of 8-bit floats in the launches that the device has, of the norm.

    Tensor cores add such products with fewer bits than float32 has.
    """
    weight, bias = float8_weight(num_out, size), fenced(num_out, dtype=torch.bfloat16)[0]
    x = quantize_rows(fenced(num_rows, size, dtype=torch.bfloat16)[0])
    with patch.object(torch.Tensor, "new_empty", _filled):
        found = scaled_tiles(x, pack(weight), bias)
    exact = codes_reference.linear(values(x), weight, bias)
    return float((found.double() - exact).norm() / exact.norm())


def copied_rows(num_out: int, num_rows: int, bias: bool) -> float:
    """Products of 8-bit floats by bulk copies, against their values'."""
    weight, biases = float8_weight(num_out, 384), fenced(num_out, dtype=torch.bfloat16)[0] if bias else None
    x = quantize_rows(fenced(num_rows, 384, dtype=torch.bfloat16)[0])
    out = torch.full((num_rows, num_out), float("nan"), dtype=torch.bfloat16)
    multiply_rows(x, pack(weight), biases, out, Float8Tuning(32, 64, 4, 2))
    return error(out, values(x), weight, biases)


def written_out(weight: IntegerWeight | Float8Weight, dtype: torch.dtype) -> float:
    """The matrix of 16 bits is the rounded one."""
    packed = pack(weight._replace(order=None) if isinstance(weight, IntegerWeight) else weight)
    with patch.object(torch, "empty", _filled_anew):
        found = dequantize(packed, dtype)
    expected = codes_reference.dequantize(weight).to(dtype)
    if packed.order is None and isinstance(weight, IntegerWeight) and weight.order is not None:
        expected = expected[:, weight.order.long()]
    return float(not torch.equal(found, expected))


def quantized_rows(size: int, num_rows: int, blocks: bool = False) -> float:
    """Largest difference of rows from what their codes mean, in units of the row's largest step."""
    x = torch.randn(num_rows, size).bfloat16() * torch.logspace(-3, 3, num_rows)[:, None].bfloat16()
    x[0] = 0
    with patch.object(torch.Tensor, "new_empty", _filled):
        rows = quantize_rows(x, blocks=blocks)
    assert rows.scales.stride() == ((1, num_rows) if blocks else (1, 1)), "as torch's products take them"
    step = x.float().abs().amax(1, keepdim=True).clamp(min=1e-6) / 448 * 16.001  # half a distance of the largest
    return float(((values(rows) - x.double()).abs() / step).max())


def normed_rows(size: int, num_rows: int, add: bool) -> float:
    """The bits of the norm, then quantized, and of the sum."""
    x, weight = (fenced(*shape, dtype=torch.bfloat16)[0] for shape in ((num_rows, size), (size,)))
    sums = [fenced(num_rows, size, dtype=torch.bfloat16)[0]] * add
    sums += [residual.clone() for residual in sums]
    expected = quantize_rows(rms_norm_triton(x, sums[0] if add else None, weight, 1e-6))
    with patch.object(torch.Tensor, "new_empty", _filled), patch.object(torch, "empty_like", _filled_like):
        found = rms_norm_float8(x, sums[1] if add else None, weight, 1e-6)
    return float(not (same_rows(found, expected) and (not add or torch.equal(*sums))))


def gated_rows(size: int, num_rows: int) -> float:
    """The bits of SwiGLU, then quantized."""
    gate_up = fenced(num_rows, 2 * size, dtype=torch.bfloat16)[0]
    with patch.object(torch.Tensor, "new_empty", _filled):
        found = swiglu_rows(gate_up)
    return float(not same_rows(found, quantize_rows(swiglu_triton(gate_up))))


def same_rows(found: Float8Rows, expected: Float8Rows) -> bool:
    """Whether codes and scales are the same bytes."""
    codes = torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return codes and torch.equal(found.scales, expected.scales)


def scaled(num_rows: int, tuning: Float8Tuning, gated: bool = False, blocks: bool = False) -> float:
    """Products of 8-bit floats, against their values'."""
    weight, bias = float8_weight(272, 400, blocks=blocks), fenced(272, dtype=torch.bfloat16)[0]
    x = quantize_rows(fenced(num_rows, 400, dtype=torch.bfloat16)[0], blocks=blocks)
    packed = pack(weight)
    with patch.object(torch.Tensor, "new_empty", _filled):
        found = scaled_tiles(x, packed, bias, tuning=tuning)
        if gated:
            return float(
                not torch.equal(scaled_tiles(x, packed, bias, gated=True, tuning=tuning), swiglu_triton(found))
            )
    return error(found, values(x), weight, bias)


def values(x: Float8Rows) -> Tensor:
    """What rows mean."""
    scales = x.scales.double().repeat_interleave(BLOCK if x.scales.shape[1] > 1 else x.codes.shape[1], 1)
    return x.codes.double() * scales[:, : x.codes.shape[1]]


def _filled(tensor: Tensor, *shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    dtype, shape = dtype or tensor.dtype, shape[0] if isinstance(shape[0], tuple) else shape
    return tensor.new_full(tuple(shape), float("nan") if dtype.is_floating_point else 0, dtype=dtype)


def _filled_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _filled(tensor, tensor.shape, dtype=dtype)


def _filled_anew(*shape: Any, dtype: torch.dtype, **_: Any) -> Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def cases() -> dict[str, Callable[[], float]]:
    torch.manual_seed(0)
    found: dict[str, Callable[[], float]] = {}
    formats: dict[str, Callable[[torch.dtype], IntegerWeight | Float8Weight]] = {
        "int4/32": lambda d: integer_weight(37, 96, 4, 32, d),
        "int4/64 zeros": lambda d: integer_weight(35, 192, 4, 64, d, zeros=True),
        "int4/128": lambda d: integer_weight(40, 1024, 4, 128, d),
        "int4/128 order": lambda d: integer_weight(9, 256, 4, 128, d, zeros=True, order=True),
        "int4 channel": lambda d: integer_weight(37, 80, 4, 80, d),
        "int4 channel long": lambda d: integer_weight(37, 1104, 4, 1104, d, zeros=True),
        "int4 channel sliced": lambda d: integer_weight(37, 1024, 4, 1024, d, zeros=True),
        "int8/32": lambda d: integer_weight(37, 96, 8, 32, d),
        "int8/128": lambda d: integer_weight(33, 384, 8, 128, d),
        "int8 channel": lambda d: integer_weight(37, 1104, 8, 1104, d),
        "int8 channel order": lambda d: integer_weight(37, 80, 8, 80, d, order=True),
        "float8 channel": lambda d: float8_weight(37, 272),
        "float8 blocks": lambda d: float8_weight(150, 400, blocks=True),
    }
    for name, make in formats.items():
        for dtype in ("bf16", "fp16"):
            for num_rows, bias in ((1, True), (3, False), (16, True), (33, True)):
                found[f"{name} {dtype} {num_rows} rows"] = lambda m=make, n=num_rows, d=DTYPES[dtype], b=bias: product(
                    m(d), n, d, linear_integer, b
                )
            found[f"written out {name} {dtype}"] = lambda m=make, d=DTYPES[dtype]: written_out(m(d), d)
    of_elements = CodeTuning(64, 64, 1, 1, 4, 2, scaled=True)
    found["scaled elements"] = lambda: product(
        with_powers(integer_weight(35, 192, 4, 64, torch.float16, zeros=True)),
        70,
        torch.float16,
        linear_codes,
        True,
        tuning=of_elements,
    )
    wholes = {"int4/128": (4, 128), "int4/256": (4, 256), "int4 channel": (4, 512), "int8 channel": (8, 512)}
    for name, bulk in BULK.items():
        for (form, (bits, group)), dtype in product_of(wholes.items(), ("bf16", "fp16")):
            found[f"{name} {form} {dtype}"] = lambda b=bits, g=group, t=bulk, d=DTYPES[dtype]: product(
                with_powers(integer_weight(83, 512, b, g, d, zeros=b == 4)), 35, d, linear_codes, True, tuning=t
            )
        found[f"gated {name}"] = lambda t=bulk: gated(
            integer_weight(166, 512, 4, 128, torch.bfloat16), 35, partial(linear_codes, tuning=t)
        )
    found["copied rows"] = lambda: copied_rows(83, 35, True)
    found["copied rows without a bias"] = lambda: copied_rows(128, 3, False)
    for form, bits in (("int4/128", 4), ("int8 channel whole", 8)):
        found[f"splits of slices {form}"] = lambda b=bits: product(
            integer_weight(35, 1024, b, 128 if b == 4 else 1024, torch.bfloat16), 13, torch.bfloat16, linear_codes,
            True, tuning=CodeTuning(16, 32, 4, 1, 4, 4, splits=2),
        )  # fmt: skip
    for group, spans, splits in ((256, 1, 1), (128, 2, 5), (64, 2, 5)):  # rows are not full; a group in two parts
        tuning = CodeTuning(16, 32, 2, spans, 2, 3, splits=splits)
        found[f"parts of groups of {group}"] = lambda g=group, t=tuning: product(
            integer_weight(35, 2560 if g == 128 else 1280, 4, g, torch.float16, zeros=True), 13, torch.float16,
            linear_codes, True, tuning=t,
        )  # fmt: skip
    found["gated splits"] = lambda: gated(integer_weight(74, 1024, 8, 1024, torch.bfloat16), 16)
    for name, tuning in TILES.items():
        for form in ("int4/128", "int8 channel", "float8 blocks"):
            found[f"{name} {form}"] = lambda m=formats[form], t=tuning: product(
                m(torch.bfloat16), 1 if isinstance(t, CodeSums) else 70, torch.bfloat16, linear_codes, True, tuning=t
            )
    for num_rows in (1, 9, 40):
        weight = integer_weight(74, 256, 4, 128, torch.bfloat16)
        found[f"gated int4 {num_rows}"] = lambda w=weight, m=num_rows: gated(w, m)
        found[f"gated float8 {num_rows}"] = lambda m=num_rows: gated(float8_weight(300, 256, blocks=True), m)
    for name, float8 in FLOAT8.items():
        for num_rows in (3, 70):
            found[f"scaled {name} {num_rows}"] = lambda m=num_rows, t=float8: scaled(m, t)
            found[f"gated scaled {name} {num_rows}"] = lambda m=num_rows, t=float8: scaled(m, t, True)
    found["quantized rows"] = lambda: quantized_rows(272, 5)
    found["quantized blocks"] = lambda: quantized_rows(384, 5, blocks=True)
    for size, num_rows in ((272, 5), (96, 13), (4200, 2)):
        for add in (False, True):
            found[f"equal norm {size} {add}"] = lambda s=size, n=num_rows, a=add: normed_rows(s, n, a)
        found[f"equal swiglu {size}"] = lambda s=size, n=num_rows: gated_rows(s, n)
    found["scaled blocks"] = lambda: scaled(70, FLOAT8["tiles"], blocks=True)
    found["scaled blocks of splits"] = lambda: scaled(3, FLOAT8["splits"], blocks=True)
    return found


if __name__ == "__main__":
    report(cases())
