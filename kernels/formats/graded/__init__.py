"""Graded sides: runs of channels of 8, 4, 2 and 1 bits, and the means of all others, in an order fixed by a basis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..family import Family, TorchOps, TritonOps
from .layout import ChannelRun, Graded, GradedSide, check_step, parse

if TYPE_CHECKING:
    import torch

ORDINARY = (
    Graded((ChannelRun(16, 4), ChannelRun(48, 2))),
    Graded((ChannelRun(16, 8), ChannelRun(16, 4), ChannelRun(16, 2), ChannelRun(16, 1))),
)


def _formats(dtype: torch.dtype) -> dict[str, Graded]:
    return {fmt.name: fmt for fmt in ORDINARY}


def _torch_ops() -> TorchOps:
    from .cpu import GRADED_CPU
    from .reference import demote, dequantize, quantize

    return TorchOps(quantize, dequantize, demote, GRADED_CPU)


def _triton() -> TritonOps:
    from .triton import GRADED_TRITON

    return GRADED_TRITON


GRADED = Family("graded", _formats, check_step, _torch_ops, _triton, parse)
GradedSide.family = GRADED

__all__ = ["GRADED", "ChannelRun", "Graded", "GradedSide"]
