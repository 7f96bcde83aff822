"""Demotion: the codes of sealed blocks step down 8 -> 4 -> 2 -> 1 bits; their metadata stays as it is."""

from __future__ import annotations

from torch import Tensor

from ..layout import BlockLayout, UniformSide, check_step
from .reference import demote_reference, shrink


def demote(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """Writes the blocks at ``src``, demoted, at ``dst``: every uniform side, in all layers, in one launch.

    A side whose format is the same in both layouts is copied. Dense sides of ``source`` are left to ``seal``.
    The result does not depend on the steps taken: 8 -> 2 gives the bytes of 8 -> 4 -> 2.

    Shapes:  memory [M] uint8;  src, dst [n] int64, byte addresses of slots, none of which overlap
    Errors:  ValueError if a side would widen, go to or from 3 bits, or change its axis or group
    Source:  PM-KVQ (arXiv 2505.18610), equivalent right shift on (min, range) metadata
    """
    for old, new in source.pairs(target):
        if isinstance(old, UniformSide):
            check_step(old, new)
    if memory.is_cuda:
        from .triton import demote_triton

        demote_triton(memory, src, dst, source, target)
    else:
        from .cpu import demote_cpu

        demote_cpu(memory, src, dst, source, target)


__all__ = ["demote", "demote_reference", "shrink"]
