"""Cosines and sines of positions, by which heads are rotated."""

from __future__ import annotations

from torch import Tensor

from .reference import cos_sin_reference


def cos_sin(positions: Tensor, frequencies: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` of ``position * frequency``, times ``scale``; the angle is rounded to float32.

    Shapes:  positions [N] int64, below 2^24;  frequencies, scale [D] float32;  returns two [N, 1, D] float32
    """
    if positions.is_cuda:
        from .triton import cos_sin_triton

        return cos_sin_triton(positions, frequencies, scale)
    return cos_sin_reference(positions, frequencies, scale)


__all__ = ["cos_sin"]
