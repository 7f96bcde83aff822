"""Checks of products with quantized weights against float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.kernels.linear import codes_reference
from qkv_engine.kernels.linear.codes import Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.float8 import can_scale
from qkv_engine.kernels.linear.packed import pack
from qkv_engine.kernels.swiglu import swiglu

from .code_weights import print_line, product_of, random_weight

MAX_ERROR = 4e-3  # of ||out||: a rounding to bf16 is 1e-3
MAX_FLOAT8_ERROR = 5e-2  # with activations of 8 bits
MAX_FLOAT8_SUMS = 1e-2  # between two orders of such sums, in which tensor cores keep fewer bits than float32 has
FORMATS = (
    "int4/32",
    "int4/128 zeros",
    "int4/128 order",
    "int4/channel",
    "int8/128",
    "int8/channel",
    "float8",
    "float8 blocks",
)


def relative_error(out: Tensor, x: Tensor, weight: IntegerWeight | Float8Weight, bias: Tensor | None) -> float:
    """||out - exact|| / ||exact||."""
    exact = F.linear(x.float(), codes_reference.dequantize(weight), None if bias is None else bias.float())
    return float((out.float() - exact).norm() / exact.norm())


class Check(NamedTuple):
    """Products to check: formats, shapes of weights, numbers of rows and dtype."""

    formats: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    row_numbers: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def cases(self) -> Iterator[tuple[str, tuple[int, int]]]:
        yield from itertools.product(self.formats, self.shapes)


def checks(shapes: dict[str, tuple[int, int]]) -> list[Check]:
    """Every format at an odd shape, and the real shapes."""
    some, real = ("int4/128 zeros", "int8/128", "float8"), tuple(shapes[name] for name in ("o", "gate_up", "down"))
    return [
        Check(FORMATS, ((1000, 1152),), (1, 5, 16, 31, 100, 256, 600)),
        Check(some, ((1000, 1152),), (1, 16, 100), torch.float16),
        Check(("int4/32", "int8", "float8"), ((74, 96),), (1, 3, 33)),
        Check(("int4/128", "int8", "float8"), real, (1, 16, 256)),
        Check(("float8 blocks",), (shapes["o"],), (64, 100, 600)),
    ]


def check(work: Check) -> int:
    """The number of wrong results. A NaN, other bits in a second run or another SwiGLU are wrong."""
    wrong = 0
    for kind, (num_out, size) in work.cases():
        weight = random_weight(kind, num_out, size, work.dtype)
        packed, bias = pack(weight), torch.randn(num_out).to(work.dtype)
        for num_rows in work.row_numbers:
            x = torch.randn(num_rows, size).to(work.dtype)
            fields = {"check": kind, "rows": num_rows, "shape": [num_out, size], "dtype": str(work.dtype)[6:]}
            try:
                out = product_of(kind)(x, packed, bias)
                error = relative_error(out, x, weight, bias)
                gated = product_of(kind)(x, packed, bias, gated=True)
                expected = swiglu(out).float()  # sums of columns may be added in another order
                is_quantized = kind.startswith("float8") and can_scale(x, packed)
                most, most_gated = (MAX_FLOAT8_ERROR, MAX_FLOAT8_SUMS) if is_quantized else (MAX_ERROR, MAX_ERROR)
                is_same = torch.equal(out, product_of(kind)(x, packed, bias))
                is_same &= float((gated.float() - expected).norm() / expected.norm()) <= most_gated
                is_right = error <= most and is_same
                if not is_right or num_rows in (1, 600):
                    print_line(**fields, error=error, same=is_same, right=is_right)
            except Exception as failure:
                is_right = False
                print_line(**fields, failed=f"{type(failure).__name__}: {failure}"[:300])
            wrong += not is_right
    return wrong
