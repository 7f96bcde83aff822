"""Cosines and sines of positions, in plain torch."""

from __future__ import annotations

from torch import Tensor


def cos_sin_reference(positions: Tensor, frequencies: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``cos_sin``."""
    angles = positions.view(-1, 1, 1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale is None else (cos * scale, sin * scale)
