"""Products that are not finished: the norm behind them adds them to the residual."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SplitSums(NamedTuple):
    """A product whose columns are split over programs, before anything adds the splits up.

    The product is ``bias``, then the sums in their order, added up in float32 and rounded once to the dtype.
    Shapes: sums float32 [SPLITS, M, N]; bias [N]
    """

    sums: Tensor
    bias: Tensor | None


class LateProduct(NamedTuple):
    """``x @ weight.T``, which is computed where the residual is known that it is added to.

    Shapes: x [M, I]; weight [O, I]
    """

    x: Tensor
    weight: Tensor

    def added_to(self, residual: Tensor) -> Tensor:
        """The sum [M, O], which overwrites ``residual``."""
        return residual.addmm_(self.x, self.weight.T)


Addend = Tensor | SplitSums | LateProduct
