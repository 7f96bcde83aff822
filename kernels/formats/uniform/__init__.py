"""Uniform sides: integer codes of 8, 4, 3, 2 or 1 bits with a minimum and a range per group.

Source: KIVI (arXiv 2402.02750), with (min, range) for (scale, zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..family import Family, TorchOps, TritonOps
from .layout import Uniform, UniformSide, check_step, parse, uniform_formats
from .presets import CANDIDATES, PRESETS

if TYPE_CHECKING:
    import torch


def _formats(dtype: torch.dtype) -> Mapping[str, Uniform]:
    return uniform_formats()


def _torch_ops() -> TorchOps:
    from .cpu import UNIFORM_CPU
    from .reference import demote, dequantize, quantize

    return TorchOps(quantize, dequantize, demote, UNIFORM_CPU)


def _triton() -> TritonOps:
    from .triton import UNIFORM_TRITON

    return UNIFORM_TRITON


UNIFORM = Family("uniform", _formats, check_step, _torch_ops, _triton, parse, PRESETS, CANDIDATES)
UniformSide.family = UNIFORM

__all__ = ["UNIFORM", "Uniform", "UniformSide"]
