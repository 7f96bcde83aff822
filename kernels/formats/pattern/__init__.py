"""Pattern sides: integer codes of the residual of each token to a pattern of the request's bank.

Source: PatternKV (arXiv 2510.05176), with (min, range) for (scale, zero), a bank a request and a byte for the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..family import Family, TorchOps, TritonOps
from ..uniform import Uniform
from .layout import NO_PATTERN, Pattern, PatternSide, check_step, parse
from .presets import PRESETS

if TYPE_CHECKING:
    import torch

ORDINARY = tuple(Pattern(Uniform(bits, axis, 128), 32) for bits in (4, 2, 1) for axis in ("channel", "token"))


def _formats(dtype: torch.dtype) -> dict[str, Pattern]:
    return {fmt.name: fmt for fmt in ORDINARY}


def _torch_ops() -> TorchOps:
    from .cpu import PATTERN_CPU
    from .reference import demote, dequantize, quantize

    return TorchOps(quantize, dequantize, demote, PATTERN_CPU)


def _triton() -> TritonOps:
    from .triton import PATTERN_TRITON

    return PATTERN_TRITON


PATTERN = Family("pattern", _formats, check_step, _torch_ops, _triton, parse, PRESETS)
PatternSide.family = PATTERN

__all__ = ["NO_PATTERN", "PATTERN", "Pattern", "PatternSide"]
