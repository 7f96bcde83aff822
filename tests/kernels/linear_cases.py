"""Cases of the products of few rows for Triton's interpreter: the largest error as a part of what rounding allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from qkv_engine.kernels.linear import reference
from qkv_engine.kernels.linear.code_tile import add_splits
from qkv_engine.kernels.linear.steady_triton import linear_steady
from qkv_engine.kernels.linear.triton import ANY, TILES, SumTuning, TileTuning, linear_few_rows, linear_splits
from qkv_engine.kernels.rms_norm.triton import rms_norm_float8, rms_norm_triton
from qkv_engine.kernels.swiglu.triton import swiglu_triton

from .fused_cases import DTYPES, fenced
from .interpreted import report

NAN = float("nan")
SUM_UNIT = 2.0**-20  # of the sum of the products' sizes: some additions in float32
TUNINGS: dict[str, SumTuning | TileTuning] = {
    "sums": SumTuning(columns=256, loads=8),
    "sums of one warp": SumTuning(columns=4096, loads=4),
    "tiles": TileTuning(block_m=8, block_n=32, block_k=64, num_warps=2, num_stages=3),
}


def product(num_rows: int, size: int, num_out: int, dtype: torch.dtype, bias: bool, tuning: str | None = None) -> float:
    """NaNs lie around every operand. ``x`` is written last: only that may happen right before the launch."""
    biases = fenced(num_out, dtype=dtype)[0] if bias else None
    weight, x = fenced(num_out, size, dtype=dtype)[0], fenced(num_rows, size, dtype=dtype)[0]
    found = linear_few_rows(x, weight, biases, tuning=TUNINGS[tuning] if tuning else None)
    assert found.shape == (num_rows, num_out) and found.dtype == dtype
    return error(found, x, weight, biases)


def error(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Largest difference from the product in float64, of half a rounding of the result and ``SUM_UNIT``."""
    operands = [None if part is None else part.double() for part in (x, weight, bias)]
    exact = reference.linear(*operands)
    size = reference.linear(*(None if part is None else part.abs() for part in operands))
    allowed = torch.finfo(found.dtype).eps / 2 * exact.abs() + SUM_UNIT * size
    return float(((found.double() - exact).abs() / allowed).max())


def gated(num_rows: int, num_out: int) -> float:
    """The bits of the product, then SwiGLU; gates of all sizes."""
    bias, weight, x = (torch.randn(shape).bfloat16() for shape in ((2 * num_out,), (2 * num_out, 80), (num_rows, 80)))
    expected = swiglu_triton(linear_few_rows(x, weight, bias))
    return float(not torch.equal(linear_few_rows(x, weight, bias, gated=True), expected))


SPLIT_TILE = TileTuning(block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=3, splits=3)


def splits(num_rows: int, dtype: torch.dtype, bias: bool) -> float:
    """As ``product``, of the sum of splits; NaN lies where none is stored."""
    biases = fenced(96, dtype=dtype)[0] if bias else None
    weight, x = fenced(96, 384, dtype=dtype)[0], fenced(num_rows, 384, dtype=dtype)[0]
    with patch.object(torch.Tensor, "new_empty", lambda x, *shape, **kind: x.new_full(shape, NAN, **kind)):
        found = linear_splits(x, weight, biases, tuning=SPLIT_TILE)
    assert found.sums.shape == (3, num_rows, 96) and found.sums.dtype is torch.float32
    for part, columns in zip(found.sums, torch.arange(384).split(128), strict=True):
        exact = x[:, columns].double() @ weight[:, columns].double().T
        assert bool(((part - exact).abs() <= 2 * SUM_UNIT * (x.abs().double() @ weight.abs().double().T)).all())
    return error(reference.add_sums(found, dtype), x, weight, biases)


def equal_norms(num_rows: int, dtype: torch.dtype, bias: bool) -> float:
    """The bits of adding the splits by a kernel of its own and then norming, in 8-bit floats, too."""
    biases = fenced(96, dtype=dtype)[0] if bias else None
    residual, norm = fenced(num_rows, 96, dtype=dtype)[0], fenced(96, dtype=dtype)[0]
    other, out = residual.clone(), torch.full((num_rows, 96), NAN, dtype=dtype)
    x, weight = torch.randn(num_rows, 384).to(dtype), torch.randn(96, 384).to(dtype)
    found = linear_splits(x, weight, biases, tuning=SPLIT_TILE)
    sums = fenced(*found.sums.shape, dtype=torch.float32)[0]
    sums.copy_(found.sums)
    add_splits(sums, biases, out, gated=False)
    splits = found._replace(sums=sums)
    assert torch.equal(reference.add_sums(splits, dtype), out)
    codes = [rms_norm_float8(each, residual.clone(), norm, 1e-6) for each in (out, splits)]
    with patch.object(torch, "empty_like", lambda like: torch.full_like(like, NAN)):
        pairs = [(rms_norm_triton(out, other, norm, 1e-6), rms_norm_triton(splits, residual, norm, 1e-6))]
    pairs += [(other, residual), (codes[0].codes.view(torch.uint8), codes[1].codes.view(torch.uint8))]
    return float(not all(torch.equal(*pair) for pair in (*pairs, (codes[0].scales, codes[1].scales))))


def alone() -> float:
    """A row of a tile has the same bits whichever rows are beside it."""
    weight, x = torch.randn(37, 80).bfloat16(), torch.randn(8, 80).bfloat16()
    together = linear_few_rows(x, weight)
    return float(any(not torch.equal(linear_few_rows(x[:n], weight), together[:n]) for n in (3, 5)))


def steady(num_rows: int, size: int, num_out: int, dtype: torch.dtype, bias: bool) -> float:
    """As ``product``, for any number of rows."""
    biases = fenced(num_out, dtype=dtype)[0] if bias else None
    weight, x = fenced(num_out, size, dtype=dtype)[0], fenced(num_rows, size, dtype=dtype)[0]
    found = linear_steady(x, weight, biases)
    assert found.shape == (num_rows, num_out) and found.dtype == dtype
    return error(found, x, weight, biases)


def steady_alone(dtype: torch.dtype) -> float:
    """A row has the same bits whatever rows are beside it, and however many tiles they take."""
    weight, x = torch.randn(37, 200).to(dtype), torch.randn(131, 200).to(dtype)
    tile = TILES[16][ANY]  # the interpreter sums as the size of a tile asks
    product = partial(linear_steady, weight=weight, tuning=tile)
    together = product(x)
    pairs = ((first, n) for n in (1, 3, 64, 65) for first in (0, 1, 131 - n))
    return float(any(not torch.equal(product(x[i : i + n]), together[i : i + n]) for i, n in pairs))


def steady_gated(num_rows: int) -> float:
    """The bits of the product, then SwiGLU."""
    weight, x = torch.randn(74, 80).bfloat16(), torch.randn(num_rows, 80).bfloat16()
    return float(not torch.equal(linear_steady(x, weight, gated=True), swiglu_triton(linear_steady(x, weight))))


def cases() -> dict[str, Callable[[], float]]:
    torch.manual_seed(0)
    found: dict[str, Callable[[], float]] = {"alone": alone}
    for name in ("bf16", "fp16"):
        dtype = DTYPES[name]
        for num_rows in (1, 2, 16, 33):
            for size, num_out, bias in ((80, 37, False), (1104, 9, True), (1024, 64, True)):
                key = f"{name} {num_rows} x {size} x {num_out} bias {bias}"
                found[key] = lambda m=num_rows, i=size, o=num_out, d=dtype, b=bias: product(m, i, o, d, b)
    for num_rows in (1, 2, 16, 33):
        found[f"gated {num_rows}"] = lambda m=num_rows: gated(m, 37)
    for name, dtype in DTYPES.items():
        found[f"alone steady {name}"] = lambda d=dtype: steady_alone(d)
        for num_rows, size, num_out, bias in ((1, 80, 37, True), (65, 63, 9, False), (30, 128, 64, True)):
            key = f"steady {name} {num_rows} x {size} x {num_out} bias {bias}"
            found[key] = lambda m=num_rows, i=size, o=num_out, d=dtype, b=bias: steady(m, i, o, d, b)
    for num_rows in (9, 129):
        found[f"gated steady {num_rows}"] = lambda m=num_rows: steady_gated(m)
    for name in ("bf16", "fp16"):
        for num_rows in (1, 5, 16, 17, 33):
            for bias in (False, True):
                key, case = f"splits {name} {num_rows} bias {bias}", (num_rows, DTYPES[name], bias)
                found[key] = lambda c=case: splits(*c)
                found[f"equal {key}"] = lambda c=case: equal_norms(*c)
    for tuning in TUNINGS:
        num_rows = 4 if tuning == "tiles" else 1
        found[tuning] = lambda m=num_rows, t=tuning: product(m, 1416, 35, torch.bfloat16, True, t)
    return found


if __name__ == "__main__":
    report(cases())
