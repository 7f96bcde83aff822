"""Demotion, plainly: one page side at a time."""

from __future__ import annotations

from torch import Tensor

from ..formats import BlockLayout
from ..formats.rows import run_rows


def demote_reference(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """Same contract as ``demote``."""
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        for (old, new), steps in source.steps(target).items():
            if old.dense_dtype is not None:
                continue
            for step in steps:
                rows, out = run_rows(memory, a, b, [step], old, new)
                out.copy_(rows if old == new else new.family.demote(rows, old, new))
