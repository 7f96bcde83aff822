"""Sealing in vectorised torch: all sides of one kind, of all layers, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout, DenseSide, UniformSide
from ..pages import gather, read_dense, scatter, write_side
from .reference import quantize


def seal_cpu(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> Tensor:
    """See ``seal``."""
    finite = torch.ones(len(src), dtype=torch.bool)
    for (old, new), members in source.pairs(target).items():
        if not isinstance(old, DenseSide):
            continue
        from_offset, to_offset = torch.tensor(members, dtype=torch.int64).T
        # One block at a time keeps the scratch small, whatever the number of blocks.
        for i in range(len(src)):
            rows = gather(memory, src[i] + from_offset, old.nbytes)
            x = read_dense(rows, old)
            finite[i] &= x.isfinite().all()
            if isinstance(new, UniformSide):
                rows = write_side(*quantize(x, new), new)
            scatter(memory, (dst[i] + to_offset).tolist(), rows)
    return finite
