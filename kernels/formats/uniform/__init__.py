"""Uniform sides: integer codes of 8, 4, 3, 2 or 1 bits with a minimum and a range per group.

Source: KIVI (arXiv 2402.02750), with (min, range) for (scale, zero).
"""

from __future__ import annotations

import torch

from ..family import Family, TritonOps
from .cpu import UNIFORM_CPU
from .layout import Uniform, UniformSide, parse, uniform_formats
from .reference import check_step, demote, dequantize, quantize


def _formats(dtype: torch.dtype) -> dict[str, Uniform]:
    return uniform_formats()


def _triton() -> TritonOps:
    from .triton import UNIFORM_TRITON

    return UNIFORM_TRITON


UNIFORM = Family("uniform", _formats, check_step, quantize, dequantize, demote, UNIFORM_CPU, _triton, parse)
UniformSide.family = UNIFORM

__all__ = ["UNIFORM", "Uniform", "UniformSide"]
