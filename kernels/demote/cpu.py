"""Demotion in vectorised torch: packed words to packed words, all layers of a block at once."""

from __future__ import annotations

from torch import Tensor

from ..formats import BlockLayout
from ..formats.rows import even_runs, run_rows


def demote_cpu(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """See ``demote``."""
    blocks = list(zip(src.tolist(), dst.tolist(), strict=True))
    for (old, new), steps in source.steps(target).items():
        if old.dense_dtype is not None:
            continue
        for run in even_runs(steps):
            for a, b in blocks:
                rows, out = run_rows(memory, a, b, run, old, new)
                if old == new:
                    out.copy_(rows)
                else:
                    new.family.cpu.demote(rows, out, old, new)
