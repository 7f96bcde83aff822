"""Sealing in vectorised torch: a block at a time, which stays in cache, with the sides of all its layers at once."""

from __future__ import annotations

from torch import Tensor

from ..formats import BlockLayout
from ..formats.dense.cpu import elements
from ..formats.rows import block_bank, even_runs, run_rows


def seal_cpu(
    memory: Tensor,
    src: Tensor,
    dst: Tensor,
    source: BlockLayout,
    target: BlockLayout,
    finite: Tensor,
    banks: Tensor | None = None,
    num_windows: Tensor | None = None,
) -> None:
    """See ``seal``."""
    steps = source.steps(target).items()
    runs = [(old, new, run) for (old, new), some in steps if old.dense_dtype is not None for run in even_runs(some)]
    for index, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        for old, new, run in runs:
            rows, out = run_rows(memory, a, b, run, old, new)
            out = out._replace(bank=block_bank(memory, banks, num_windows, index, run, new))
            if not new.family.cpu.seal(elements(rows, old), out, new):
                finite[index] = 0
