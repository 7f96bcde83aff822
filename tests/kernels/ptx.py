"""An interpreter of the few PTX instructions in our assembly texts, over arrays: what a GPU would compute, on a CPU.

Source of their meaning: the PTX ISA, sections of the instructions. Registers are uint32 arrays of one shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import torch

Words = np.ndarray  # uint32


def run(text: str, inputs: Mapping[str, Words], outputs: list[str]) -> list[Words]:
    """The ``outputs`` ("$0") of ``text``, with registers ``inputs`` ("$4") given.

    Raises ``KeyError`` for what is read before it is written, and for an instruction that is not known.
    """
    registers = dict(inputs)
    for statement in text.strip().removeprefix("{").removesuffix("}").split(";"):
        statement = " ".join(statement.split())
        if not statement or statement.startswith(".reg"):
            continue
        name, operands = statement.split(" ", 1)
        to, *sources = (each.strip() for each in operands.split(","))
        registers[to] = _INSTRUCTIONS[name](*(_value(each, registers) for each in sources))
    return [registers[each] for each in outputs]


def pairs(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """The two 16-bit floats of each word, the lower half first, [..., 2]."""
    return torch.from_numpy(np.ascontiguousarray(words)).view(dtype).view(*words.shape, 2)


def words_of(elements: torch.Tensor) -> Words:
    """Words of elements that lie in a row, of 16-bit floats [..., 2], bytes [..., 4] or float32 [...]."""
    found = elements.contiguous().view(torch.int32)
    return (found if elements.dtype is torch.float32 else found.squeeze(-1)).numpy().view(np.uint32)


def _value(name: str, registers: Mapping[str, Words]) -> Words:
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", name):
        return np.uint32(int(name[2:], 16))
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", name):
        return np.uint32(int(name, 0) & 0xFFFFFFFF)
    return registers[name]


def _permute(a: Words, b: Words, places: Words) -> Words:
    """``prmt``: four bytes of the eight of ``b`` and ``a``, or their signs where a place has its fourth bit."""
    found = np.zeros_like(np.asarray(a | b))
    for number in range(4):
        place = int(places) >> (4 * number) & 15
        byte = (a if place & 4 == 0 else b) >> np.uint32(8 * (place & 3)) & np.uint32(255)
        if place & 8:
            byte = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        found = found | (byte << np.uint32(8 * number)).astype(np.uint32)
    return found


def _lookup(a: Words, b: Words, c: Words, table: Words) -> Words:
    """``lop3``: any function of three bits."""
    found = np.uint32(0)
    for number in range(8):
        if int(table) >> number & 1:
            ones = (each if number >> bit & 1 else ~each for each, bit in ((a, 2), (b, 1), (c, 0)))
            first, second, third = ones
            found = found | (first & second & third)
    return found


def _fma_pair(dtype: torch.dtype) -> Callable[[Words, Words, Words], Words]:
    """``fma`` of two 16-bit floats; the sums here are exact in float64, whose rounding to float32 keeps them."""

    def fma(a: Words, b: Words, c: Words) -> Words:
        arrays = np.broadcast_arrays(a, b, c)
        x, y, z = (pairs(each, dtype).double() for each in arrays)
        return words_of((x * y + z).to(dtype))

    return fma


def _floats(operation: Callable[..., torch.Tensor]) -> Callable[..., Words]:
    def compute(*operands: Words) -> Words:
        arrays = np.broadcast_arrays(*operands)
        wide = (torch.from_numpy(np.ascontiguousarray(each)).view(torch.float32).double() for each in arrays)
        return words_of(operation(*wide).float())

    return compute


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shr.b32": lambda a, b: a >> b,
    "shr.s32": lambda a, b: (a.view(np.int32) >> b.astype(np.int32)).view(np.uint32),
    "mul.lo.u32": lambda a, b: (a.astype(np.uint64) * np.uint64(b) & np.uint64(0xFFFFFFFF)).astype(np.uint32),
    "prmt.b32": _permute,
    "lop3.b32": _lookup,
    "fma.rn.bf16x2": _fma_pair(torch.bfloat16),
    "fma.rn.f16x2": _fma_pair(torch.float16),
    "fma.rn.f32": _floats(lambda a, b, c: a * b + c),
    "add.f32": _floats(lambda a, b: a + b),
    "sub.f32": _floats(lambda a, b: a - b),
}
