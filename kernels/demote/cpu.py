"""Demotion in vectorised torch: all sides of one kind, of all layers and blocks, at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout, UniformSide
from ..pages import gather, read_codes, read_meta, scatter, write_side
from .reference import shrink


def demote_cpu(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """See ``demote``."""
    for (old, new), members in source.pairs(target).items():
        if not isinstance(old, UniformSide) or not isinstance(new, UniformSide):
            continue
        from_offset, to_offset = torch.tensor(members, dtype=torch.int64).T[:, :, None]
        rows = gather(memory, (src + from_offset).flatten(), old.nbytes)
        if old != new:
            codes = _shrink_table(old.bits, new.bits)[read_codes(rows, old).int()]
            rows = write_side(codes, read_meta(rows, old), new)
        scatter(memory, (dst + to_offset).flatten().tolist(), rows)


def _shrink_table(from_bits: int, to_bits: int) -> Tensor:
    return shrink(torch.arange(2**from_bits, dtype=torch.int32), from_bits, to_bits).to(torch.uint8)
