"""Sealing, plainly: one page side at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import BlockLayout
from ..formats.dense.cpu import elements
from ..formats.rows import block_bank, run_rows


def seal_reference(
    memory: Tensor,
    src: Tensor,
    dst: Tensor,
    source: BlockLayout,
    target: BlockLayout,
    banks: Tensor | None = None,
    num_windows: Tensor | None = None,
) -> Tensor:
    """Same contract as ``seal``."""
    finite = torch.ones(len(src), dtype=torch.int64)
    for block, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        for (old, new), steps in source.steps(target).items():
            if old.dense_dtype is None:
                continue
            for step in steps:
                rows, out = run_rows(memory, a, b, [step], old, new)
                x = elements(rows, old)
                finite[block] &= x.isfinite().all()
                bank = block_bank(memory, banks, num_windows, block, [step], new)
                out.copy_(new.family.quantize(x, new, bank))
    return finite
