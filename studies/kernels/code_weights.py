"""Random quantized weights and rows on a GPU, and lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkv_engine.kernels.linear.codes import Float8Weight, IntegerWeight
from qkv_engine.kernels.linear.float8 import linear_float8
from qkv_engine.kernels.linear.integer import linear_integer
from qkv_engine.kernels.linear.packed import PackedCodes, pack

GROUP = 128  # of 4 bits; the others have a scale a channel


def print_line(**fields: Any) -> None:
    """One line of JSON; floats to five digits."""
    print(json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def random_weight(
    kind: str, num_out: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> IntegerWeight | Float8Weight:
    """Random codes on the GPU; ``kind``: "int4/128 zeros" and the like."""
    name, *options = kind.split()
    name, _, group = name.partition("/")
    if name == "float8":
        codes = torch.randn(num_out, size, dtype=torch.float16).mul_(100).clamp_(-448, 448)
        blocks = (-(-num_out // 128), -(-size // 128)) if options else (num_out, 1)
        return Float8Weight(codes.to(torch.float8_e4m3fn), torch.rand(blocks) / 1000 + 1e-4)
    columns = size if group in ("", "channel") else int(group)
    scales = (torch.rand(num_out, size // columns) / 100 + 1e-3).to(dtype)
    if name == "int8":
        return IntegerWeight(torch.randint(-128, 128, (num_out, size), dtype=torch.int8), scales)
    codes = torch.randint(0, 256, (num_out, size // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if options else None
    order = torch.randperm(size, dtype=torch.int32) if options == ["order"] else None
    return IntegerWeight(codes, scales, zeros, order)


def timed_weight(kind: str, num_out: int, size: int) -> PackedCodes:
    """As it is timed: 4 bits in groups."""
    return pack(random_weight(f"{kind}/{GROUP}" if kind == "int4" else kind, num_out, size))


def random_rows(num_rows: int, size: int) -> Tensor:
    """In bf16 on the GPU."""
    return torch.randn(num_rows, size, dtype=torch.bfloat16)


def product_of(kind: str) -> Callable[..., Tensor]:
    return linear_float8 if kind.startswith("float8") else linear_integer
