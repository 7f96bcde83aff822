"""Kitty sides: K at 2 bits, a share of its channels at 4 bits, chosen anew in every page and head.

Source: Kitty (arXiv 2511.18643), with (min, range) for (scale, zero) and a shorter index.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from ..family import Family, Side, TorchOps, TritonOps
from ..uniform import UniformSide
from .layout import Kitty, KittySide, Ranking, parse
from .presets import CANDIDATES, PRESETS

if TYPE_CHECKING:
    import torch

ORDINARY = (Kitty(Decimal("12.5")), Kitty(Decimal(25)))  # the paper's Kitty and Kitty-Pro


def _check_step(old: Side, new: KittySide) -> None:
    if not isinstance(old, UniformSide) or old not in (new.uniform(8), new.uniform(4)):
        raise ValueError("kitty sides step down from K per channel alone, of 8 or 4 bits in groups of 128")


def _formats(dtype: torch.dtype) -> dict[str, Kitty]:
    return {fmt.name: fmt for fmt in ORDINARY}


def _torch_ops() -> TorchOps:
    from .cpu import KITTY_CPU
    from .reference import demote, dequantize, quantize

    return TorchOps(quantize, dequantize, demote, KITTY_CPU)


def _triton() -> TritonOps:
    from .triton import KITTY_TRITON

    return KITTY_TRITON


KITTY = Family("kitty", _formats, _check_step, _torch_ops, _triton, parse, PRESETS, CANDIDATES)
KittySide.family = KITTY

__all__ = ["KITTY", "Kitty", "KittySide", "Ranking"]
