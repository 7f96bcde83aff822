"""A product whose columns are split over programs, before anything adds the splits up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SplitSums(NamedTuple):
    """What ``linear_sums`` may leave for ``add_rms_norm``.

    The product is ``bias``, then the sums in their order, added up in float32 and rounded once to the dtype.
    Shapes: sums float32 [SPLITS, M, N]; bias [N]
    """

    sums: Tensor
    bias: Tensor | None
