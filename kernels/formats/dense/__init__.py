"""Dense sides: unquantized K and V elements in bf16, fp16 or fp32."""

from __future__ import annotations

from ..family import Family, TorchOps, TritonOps
from .layout import Dense, DenseSide, check_step, dense_formats
from .presets import CANDIDATES, PRESETS


def _torch_ops() -> TorchOps:
    from .cpu import DENSE_TORCH

    return DENSE_TORCH


def _triton() -> TritonOps:
    from .triton import DENSE_TRITON

    return DENSE_TRITON


DENSE = Family("dense", dense_formats, check_step, _torch_ops, _triton, presets=PRESETS, candidates=CANDIDATES)
DenseSide.family = DENSE

__all__ = ["DENSE", "Dense", "DenseSide"]
