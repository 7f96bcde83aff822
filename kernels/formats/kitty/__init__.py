"""Kitty sides: K at 2 bits, a share of its channels at 4 bits, chosen anew in every page and head.

Source: Kitty (arXiv 2511.18643), with (min, range) for (scale, zero) and a shorter index.
"""

from __future__ import annotations

from decimal import Decimal

import torch

from ..family import Family, Side, TritonOps
from ..uniform import UniformSide
from .cpu import KITTY_CPU
from .layout import Kitty, KittySide, Ranking, parse
from .reference import demote, dequantize, quantize

ORDINARY = (Kitty(Decimal("12.5")), Kitty(Decimal(25)))  # the paper's Kitty and Kitty-Pro


def _check_step(old: Side, new: KittySide) -> None:
    if not isinstance(old, UniformSide) or old not in (new.uniform(8), new.uniform(4)):
        raise ValueError("kitty sides step down from K per channel alone, of 8 or 4 bits in groups of 128")


def _formats(dtype: torch.dtype) -> dict[str, Kitty]:
    return {fmt.name: fmt for fmt in ORDINARY}


def _triton() -> TritonOps:
    from .triton import KITTY_TRITON

    return KITTY_TRITON


KITTY = Family("kitty", _formats, _check_step, quantize, dequantize, demote, KITTY_CPU, _triton, parse)
KittySide.family = KITTY

__all__ = ["KITTY", "Kitty", "KittySide", "Ranking"]
