"""Centres in plain torch, the sides of all layers at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Banks, BlockLayout
from ..formats.dense import elements
from ..formats.rows import even_runs, run_bank, run_rows
from ..formats.uniform.reference import LIMIT


def centre_reference(memory: Tensor, src: Tensor, source: BlockLayout, target: BlockLayout, banks: Banks) -> None:
    """The same as ``write_centres``."""
    for a, bank, centre in zip(src.tolist(), banks.address.tolist(), banks.centre.tolist(), strict=True):
        for (old, new), steps in source.steps(target).items():
            if old.dense_dtype is None or not 0 <= centre < new.num_patterns:
                continue
            for run in even_runs(steps):
                x = elements(run_rows(memory, a, a, run, old, old)[0], old)
                first = centre * new.pattern_nbytes
                out = run_bank(memory, bank, run, new)[:, first : first + new.pattern_nbytes]
                out.view(torch.float16).copy_(centres(x).flatten(1))


def centres(x: Tensor) -> Tensor:
    """(min + max) / 2 of each channel: [n, H, T, D] of any float type to [n, H, D] fp16."""
    x = torch.where(x.isfinite(), x, 0).float().clamp(-LIMIT, LIMIT)
    return ((x.amin(2) + x.amax(2)) * 0.5 + 0.0).half()
