"""Tables on the device of the places of sides in two layouts, for kernels that rewrite blocks."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .family import Side
from .page import BlockLayout


@lru_cache  # an engine has few layouts, for life
def step_table(source: BlockLayout, target: BlockLayout, old: Side, new: Side, device: torch.device) -> Tensor:
    """Offsets of codes and metadata in the source and in the target for each ``old`` that becomes ``new``: [n, 4]."""
    rows = [(*step.source, *step.target) for step in source.steps(target)[old, new]]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@lru_cache
def bank_table(source: BlockLayout, target: BlockLayout, old: Side, new: Side, device: torch.device) -> Tensor:
    """Offsets in a bank of the patterns of each ``old`` that becomes ``new``: [n]."""
    offsets = [step.bank for step in source.steps(target)[old, new]]
    return torch.tensor(offsets, dtype=torch.int64, device=device)
