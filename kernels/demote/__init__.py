"""Demotion: sealed blocks are rewritten in formats of fewer bits."""

from __future__ import annotations

from torch import Tensor

from ..formats import BlockLayout, check_step
from .reference import demote_reference


def demote(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """Writes the blocks at ``src`` in the narrower ``target`` layout at ``dst``: all sides of codes, a launch a format.

    A side whose format is the same in both layouts is copied. Dense sides of ``source`` are left to ``seal``.

    Shapes:  memory [M] uint8;  src, dst [n] int64, byte addresses of slots, none of which overlap
    Errors:  ValueError if no demotion leads from a side's format to its new one
    """
    for old, new in source.steps(target):
        if old.dense_dtype is None:
            check_step(old, new)
    if memory.is_cuda:
        from .triton import demote_triton

        demote_triton(memory, src, dst, source, target)
    else:
        from .cpu import demote_cpu

        demote_cpu(memory, src, dst, source, target)


__all__ = ["demote", "demote_reference"]
