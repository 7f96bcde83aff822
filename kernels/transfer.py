"""Moves blocks from slot to slot: as they are, or down to another layout. One call for all layers of many blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .copies import to_device
from .demote import demote
from .layout import BlockLayout, DenseSide, UniformSide
from .seal import seal


def transfer(memory: Tensor, src: list[int], dst: list[int], source: BlockLayout, target: BlockLayout) -> Tensor | None:
    """Writes the blocks at ``src``, laid out as ``target``, at ``dst``.

    Shapes:  memory [M] uint8;  src, dst: byte addresses of slots, none of which overlap
    Returns: [n] bool, False for a block whose dense values are not all finite; ``None`` if nothing was sealed
    """
    if source == target:
        copy(memory, src, dst, source.nbytes)
        return None
    from_, to = to_device(torch.tensor([src, dst], dtype=torch.int64), memory.device)
    finite = None
    if any(isinstance(side, DenseSide) for side in source.sides):
        finite = seal(memory, from_, to, source, target)
    if any(isinstance(side, UniformSide) for side in source.sides):
        demote(memory, from_, to, source, target)
    return finite


def copy(memory: Tensor, src: list[int], dst: list[int], nbytes: int) -> None:
    """Copies ``nbytes`` bytes from each address to its partner."""
    for a, b in zip(src, dst, strict=True):
        memory[b : b + nbytes] = memory[a : a + nbytes]
