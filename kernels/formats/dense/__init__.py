"""Dense sides: unquantized K and V elements in bf16, fp16 or fp32."""

from __future__ import annotations

from ..family import Family, TritonOps
from .cpu import DENSE_CPU, check_step, demote, dequantize, elements, quantize
from .layout import Dense, DenseSide, dense_formats


def _triton() -> TritonOps:
    from .triton import DENSE_TRITON

    return DENSE_TRITON


DENSE = Family("dense", dense_formats, check_step, quantize, dequantize, demote, DENSE_CPU, _triton)
DenseSide.family = DENSE

__all__ = ["DENSE", "Dense", "DenseSide", "elements"]
