"""Formats of a recurrent state: float32, or integer codes of 16 or 8 bits with one float32 scale a column.

A column is what a head holds under one channel of V: its DK values share a scale, so that decay, which changes all of
them alike, changes the scale and no code. Codes of 8 bits are those of 16 without their last byte, rounded: a state
that goes from 16 to 8 bits is the very one that had gone there at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

LEVELS: Final = 127 << 8  # of 16 bits on either side of zero; 127 of 8
LEAST: Final = 1e-30  # of a column's largest magnitude: scales and their inverses are normal numbers


class StateFormat(NamedTuple):
    """How a state is stored. ``bits``: of an element, 32 for float32; ``dtype``: of the elements."""

    name: str
    bits: int
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        """Whether elements are codes, with scales behind them."""
        return self.dtype is not torch.float32

    @property
    def shift(self) -> int:
        """Bits by which its codes are shorter than those of 16."""
        return 16 - self.bits if self.has_scales else 0


FLOAT32: Final = StateFormat("float32", 32, torch.float32)
INT16: Final = StateFormat("int16", 16, torch.int16)
INT8: Final = StateFormat("int8", 8, torch.int8)
STATE_FORMATS: Final = {fmt.name: fmt for fmt in (FLOAT32, INT16, INT8)}  # widest first


class Stored(NamedTuple):
    """A state as it is stored: ``elements`` [..., DK, DV]; of codes the ``scales`` [..., DV] float32 to multiply by."""

    elements: Tensor
    scales: Tensor | None


def encode(state: Tensor, fmt: StateFormat) -> Stored:
    """A state [..., DK, DV] float32 in a format; codes round to the nearest."""
    if not fmt.has_scales:
        return Stored(state, None)
    largest = state.abs().amax(-2).clamp_min(LEAST)
    levels = torch.full_like(largest, LEVELS)  # torch divides numbers by tensors with two roundings
    wide = torch.floor(state * (levels / largest).unsqueeze(-2) + 0.5).clamp(-LEVELS, LEVELS).to(torch.int16)
    return narrow(Stored(wide, largest / levels), INT16, fmt)


def decode(stored: Stored) -> Tensor:
    """The state [..., DK, DV] float32; without codes the stored one itself."""
    elements, scales = stored
    return elements if scales is None else elements.float() * scales.unsqueeze(-2)


def narrow(stored: Stored, old: StateFormat, new: StateFormat) -> Stored:
    """A state in the format ``old`` in one that is no wider.

    From 16 to 8 bits integers alone change; halves round to even codes, or thousands of steps would drift.
    """
    elements, scales = stored
    if scales is None:
        return encode(elements, new)
    lost = new.shift - old.shift
    if not lost:
        return stored
    wide = elements.to(torch.int32)
    codes = (wide + (1 << lost >> 1) - 1 + (wide >> lost & 1)) >> lost
    return Stored(codes.to(new.dtype), scales * float(1 << lost))
