"""A few instructions of PTX on 32-bit registers in Python, so that assembly of kernels can be tested without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

MASK = 0xFFFFFFFF
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
INTEGERS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": lambda a, b, places: _permute(a, b, places),
}


def run_ptx(text: str, num_outputs: int, *operands: int) -> list[int]:
    """The first ``num_outputs`` operands after ``text``, as ``inline_asm_elementwise`` takes it; inputs are words."""
    registers = {f"${num_outputs + index}": word for index, word in enumerate(operands)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for statement in re.sub(r"[{}]", "", text).split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        name, rest = statement.strip().split(maxsplit=1)
        to, *sources = (part.strip() for part in rest.split(","))
        words = [value(source) for source in sources]
        registers[to] = (INTEGERS[name](*words) if name in INTEGERS else _fma(name, *words)) & MASK
    return [registers[f"${index}"] for index in range(num_outputs)]


def halves(word: int) -> list[int]:
    """The lower and the upper 16 bits."""
    return [word & 0xFFFF, word >> 16]


def _permute(a: int, b: int, places: int) -> int:
    source = a | b << 32
    return sum((source >> 8 * (places >> 4 * byte & 7) & 255) << 8 * byte for byte in range(4))


def _fma(name: str, a: int, b: int, c: int) -> int:
    """Of both halves, exact up to one rounding: float64 holds products of 16-bit floats."""
    dtype = HALVES[name.removeprefix("fma.rn.").removesuffix("x2")]
    x, y, z = (_floats(word, dtype) for word in (a, b, c))
    low, high = (x * y + z).to(dtype).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def _floats(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(halves(word), dtype=torch.int32).to(torch.int16).view(dtype).double()
