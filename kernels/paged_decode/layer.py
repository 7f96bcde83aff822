"""A layer's page formats for decode attention, which launches once a format, on however many rungs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import PageLayout
from .split import Bounds


class FormatRange(NamedTuple):
    """Consecutive rungs ``first`` to ``end - 1``, on which a layer's pages have the layout of ``page``."""

    page: PageLayout
    first: int
    end: int

    def max_items(self, bounds: Bounds) -> int:
        """Bound of the items on these rungs, which may all be on one of them."""
        return bounds.first * (self.first == 0) + bounds.others * (self.end > 1)


@dataclass(frozen=True)
class LayerFormats:
    """A layer's formats, widest first.

    Shapes:  offsets [R, 4] int64 on the device, bytes from a slot's address on each rung to the K codes, K metadata,
             V codes and V metadata
    """

    ranges: tuple[FormatRange, ...]
    offsets: Tensor

    @classmethod
    def of(cls, pages: Sequence[PageLayout], device: torch.device) -> LayerFormats:
        """The formats of ``pages``, a layer's page layouts by rung. Equal formats stand on consecutive rungs."""
        ranges = []
        for _, same in groupby(enumerate(pages), lambda rung: (rung[1].k, rung[1].v)):
            (first, page), *others = same
            ranges.append(FormatRange(page, first, first + 1 + len(others)))
        offsets = [page.offsets for page in pages]
        return cls(tuple(ranges), torch.tensor(offsets, dtype=torch.int64, device=device))
