"""Pattern sides: integer codes of the residual of each token to a pattern of the request's bank.

Source: PatternKV (arXiv 2510.05176), with (min, range) for (scale, zero), a bank a request and a byte for the index.
"""

from __future__ import annotations

import torch

from ..family import Family, TritonOps
from ..uniform import Uniform
from .cpu import PATTERN_CPU
from .layout import NO_PATTERN, Pattern, PatternSide, parse
from .reference import check_step, demote, dequantize, quantize

ORDINARY = tuple(Pattern(Uniform(bits, axis, 128), 32) for bits in (4, 2, 1) for axis in ("channel", "token"))


def _formats(dtype: torch.dtype) -> dict[str, Pattern]:
    return {fmt.name: fmt for fmt in ORDINARY}


def _triton() -> TritonOps:
    from .triton import PATTERN_TRITON

    return PATTERN_TRITON


PATTERN = Family("pattern", _formats, check_step, quantize, dequantize, demote, PATTERN_CPU, _triton, parse)
PatternSide.family = PATTERN

__all__ = ["NO_PATTERN", "PATTERN", "Pattern", "PatternSide"]
