"""Rewrites blocks in another layout, or moves them as they are. One call for all layers of many blocks."""

from __future__ import annotations

from torch import Tensor

from .demote import demote
from .formats import BlockLayout
from .seal import seal


def transfer(
    memory: Tensor,
    src: Tensor,
    dst: Tensor,
    source: BlockLayout,
    target: BlockLayout,
    finite: Tensor,
    banks: Tensor | None = None,
    num_windows: Tensor | None = None,
) -> None:
    """Writes the blocks at ``src``, of layout ``source``, at ``dst`` in layout ``target``.

    Shapes:  memory [M] uint8;  src, dst [n] int64, byte addresses of slots, none of which overlap;
             finite [n] int64, ones: 0 is written for a block with dense values that are not all finite;
             banks, num_windows [n] int64, as in ``seal``, where dense sides get patterns
    """
    if source.has_dense:
        seal(memory, src, dst, source, target, finite, banks, num_windows)
    if source.has_codes:
        demote(memory, src, dst, source, target)


def copy(memory: Tensor, src: list[int], dst: list[int], nbytes: int) -> None:
    """Copies ``nbytes`` bytes from each address in ``src`` to its partner in ``dst``."""
    for a, b in zip(src, dst, strict=True):
        memory[b : b + nbytes] = memory[a : a + nbytes]
