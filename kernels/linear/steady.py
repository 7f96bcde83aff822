"""Products whose rows have the same bits whatever rows are beside them: those of a deterministic engine.

A library chooses its kernel, and with it the order in which a dot product is summed, by the number of rows. On the CPU
numbers of rows that agree are found when a weight is packed, and products keep to them; on a GPU one kernel with tiles
of one size computes any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..swiglu import swiglu
from . import cpu
from .cpu import PackedWeight
from .padding import padded_rows

MOST_ROWS = 128  # of a product, those of a prompt's block: more read the weight again, which costs little then
ENOUGH_ROWS = 32  # of the largest product: fewer would read the weight too often
FEWEST_ROWS = (1, 2, 4, 8, 16)  # tried as the smallest product
SHIFTS = (0, 1, 3)  # places of a row in the products that are compared
DIVIDED_ELEMENTS = 2**15  # from here on torch divides an elementwise operator among threads, in the middle of rows


class RowSpan(NamedTuple):
    """Products of ``least`` to ``most`` rows give a row the same bits, in any place."""

    least: int
    most: int


class SteadyWeight(NamedTuple):
    """A weight [O, I] whose products do not depend on the number of rows. On a GPU any number may be computed at once.

    ``span``: numbers of rows that agree on the CPU.
    """

    weight: Tensor | PackedWeight
    span: RowSpan | None


def pack_steadily(weight: object) -> SteadyWeight:
    """A plain ``weight`` [O, I] in the fastest layout whose products do not depend on the number of rows.

    On the CPU they agree as long as products are computed with as many threads as the caller has now.
    """
    assert isinstance(weight, Tensor), "quantized weights are unpacked, or refused"
    if weight.is_cuda:
        return SteadyWeight(weight, None)
    rows, size = weight.shape
    return SteadyWeight(_packed(weight), agreeing_rows(rows, size, weight.dtype, torch.get_num_threads()))


def linear(x: Tensor, weight: SteadyWeight, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear``."""
    if weight.span is None:
        from .steady_triton import linear_steady

        assert isinstance(weight.weight, Tensor)
        return linear_steady(x, weight.weight, bias)
    least, most = weight.span
    if len(x) > most:
        return torch.cat([linear(piece, weight, bias) for piece in x.split(most)])
    number = min(most, max(least, padded_rows(len(x), x.device)))
    padded = x if number == len(x) else F.pad(x, (0, 0, 0, number - len(x)))
    return _product(padded, weight.weight, bias)[: len(x)]


def linear_swiglu(x: Tensor, weight: SteadyWeight, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear_swiglu``."""
    return by_rows(swiglu, linear(x, weight, bias))


def by_rows(operator: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise ``operator`` from rows [N, I] to rows, so that the bits of a row do not depend on N.

    On the CPU torch rounds a vector's exponentials otherwise than those of a remainder, and a row that is divided among
    threads has a remainder in its middle.
    """
    rows = max(1, (DIVIDED_ELEMENTS - 1) // x.shape[1])
    if not x.is_cpu or len(x) <= rows:
        return operator(x)
    return torch.cat([operator(piece) for piece in x.split(rows)])


@cache
def agreeing_rows(num_out: int, size: int, dtype: torch.dtype, num_threads: int) -> RowSpan:
    """Numbers of rows that agree in products with weights of a shape on this machine, found by trying them.

    Takes as long as some hundred rows of products. ``num_threads`` are those of the calling thread.
    """
    assert num_threads == torch.get_num_threads()
    numbers = sorted({padded_rows(number, torch.device("cpu")) for number in range(1, MOST_ROWS + 1)})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MOST_ROWS + max(SHIFTS), size, generator=generator).to(dtype)
    weight = _packed(torch.randn(num_out, size, generator=generator).to(dtype))
    found = {(n, shift): _product(x[shift : shift + n].clone(), weight, None) for n in numbers for shift in SHIFTS}

    def agree(most: int, number: int) -> bool:
        return all(
            torch.equal(found[number, shift][: most - shift], found[most, 0][shift : shift + number])
            for shift in SHIFTS
        )

    best = RowSpan(1, 1)  # a lone row has no neighbours
    for least in FEWEST_ROWS:
        for most in reversed(numbers):
            if most > best.most and all(agree(most, number) for number in numbers if least <= number <= most):
                best = RowSpan(least, most)
        if best.most >= ENOUGH_ROWS:
            break
    return best


def _packed(weight: Tensor) -> Tensor | PackedWeight:
    return PackedWeight(cpu.reorder(weight), None) if cpu.can_pack(weight) else weight


def _product(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    return cpu.linear(x, weight, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)
