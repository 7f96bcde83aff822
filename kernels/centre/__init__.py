"""Centres: the patterns that blocks add to their requests' banks before they are sealed."""

from __future__ import annotations

from torch import Tensor

from ..formats import Banks, BlockLayout
from .reference import centre_reference


def write_centres(memory: Tensor, src: Tensor, source: BlockLayout, target: BlockLayout, banks: Banks) -> None:
    """Writes (min + max) / 2 of each channel over a block's tokens as pattern ``banks.centre`` of its bank.

    In all layers, of each dense side of the blocks at ``src`` that has patterns in ``target``; values that are not
    finite count as 0, large ones are clamped.

    Shapes:  memory [M] uint8;  src [n] int64, byte addresses of slots
    """
    if memory.is_cuda:
        from .triton import centre_triton

        centre_triton(memory, src, source, target, banks)
    else:
        centre_reference(memory, src, source, target, banks)


__all__ = ["centre_reference", "write_centres"]
