"""Which sides of a block a kernel rewrites, as a table on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import BlockLayout, Side

Kind = tuple[int, ...]


class SideTable(NamedTuple):
    """Shapes: rows [n, 3] int64, for each side (index of its kind, its offset in the source, in the target)"""

    first: Side  # of the source; all have its shape
    kinds: tuple[Kind, ...]
    rows: Tensor


@lru_cache  # an engine has few layouts, for life
def side_table(
    source: BlockLayout, target: BlockLayout, kind_of: Callable[[Side, Side], Kind | None], device: torch.device
) -> SideTable | None:
    """The sides that have a kind; ``None`` if there are none."""
    kinds: dict[Kind, int] = {}
    rows, first = [], None
    for (old, new), members in source.pairs(target).items():
        kind = kind_of(old, new)
        if kind is not None:
            first = old if first is None else first
            index = kinds.setdefault(kind, len(kinds))
            rows += [(index, *offsets) for offsets in members]
    if first is None:
        return None
    return SideTable(first, tuple(kinds), torch.tensor(rows, dtype=torch.int64, device=device))
