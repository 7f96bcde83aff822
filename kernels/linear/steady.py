"""Products whose rows have the same bits whatever rows are beside them: those of a deterministic engine.

A library chooses its kernel, and with it the order in which a dot product is summed, by the number of rows. On the CPU
a layout and numbers of rows that agree are found when a weight is packed, and products keep to them; on a GPU one
kernel, whose tiles all sum in one order, computes any number of rows.
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
FEW_ROWS = 2  # a lone row has a kernel of its own in most libraries, so that two are computed
SHIFTS = (0, 1, 3)  # places of a row in the products that are compared
DIVIDED_ELEMENTS = 2**15  # from here on torch divides an elementwise operator among threads, in the middle of rows


class RowSpan(NamedTuple):
    """Products of ``least`` to ``most`` rows give a row the same bits, in any place."""

    least: int
    most: int


class Columns(NamedTuple):
    """A weight as its columns [I, O], for torch's own product."""

    columns: Tensor


Layout = Tensor | PackedWeight | Columns


class SteadyWeight(NamedTuple):
    """A weight [O, I] whose products do not depend on the number of rows. On a GPU any number may be computed at once.

    ``span``: numbers of rows that agree on the CPU.
    """

    weight: Layout
    span: RowSpan | None


def pack_steadily(weight: object) -> SteadyWeight:
    """A plain ``weight`` [O, I] in the fastest layout whose products do not depend on the number of rows.

    On the CPU they agree as long as products are computed with as many threads as the caller has now.
    """
    assert isinstance(weight, Tensor), "quantized weights are unpacked, or refused"
    if weight.is_cuda:
        return SteadyWeight(weight, None)
    layout, span = steady_layout(*weight.shape, weight.dtype, torch.get_num_threads())
    return SteadyWeight(layout(weight.detach()), span)


def linear(x: Tensor, weight: SteadyWeight, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear``."""
    if weight.span is None:
        return _linear_on_gpu(x, weight, bias, gated=False)
    least, most = weight.span
    if len(x) > most:
        return torch.cat([linear(piece, weight, bias) for piece in x.split(most)])
    number = min(most, max(least, padded_rows(len(x), x.device)))
    if number == len(x):
        return _product(x, weight.weight, bias)
    # Most often one row becomes two; a copy takes half the time of zeros.
    padded = torch.cat((x, x)) if number == 2 * len(x) else F.pad(x, (0, 0, 0, number - len(x)))
    return _product(padded, weight.weight, bias)[: len(x)]


def linear_swiglu(x: Tensor, weight: SteadyWeight, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear_swiglu``."""
    if weight.span is None:
        return _linear_on_gpu(x, weight, bias, gated=True)
    return by_rows(swiglu, linear(x, weight, bias))


def _linear_on_gpu(x: Tensor, weight: SteadyWeight, bias: Tensor | None, *, gated: bool) -> Tensor:
    from .steady_triton import linear_steady

    assert isinstance(weight.weight, Tensor)
    return linear_steady(x, weight.weight, bias, gated=gated)


def by_rows(operator: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise ``operator`` from rows [N, I] to rows, so that the bits of a row do not depend on N.

    On the CPU torch rounds a vector's exponentials otherwise than those of a remainder, and a row that is divided among
    threads has a remainder in its middle.
    """
    rows = max(1, (DIVIDED_ELEMENTS - 1) // x.shape[1])
    if not x.is_cpu or len(x) <= rows or torch.get_num_threads() == 1:
        return operator(x)
    return torch.cat([operator(piece) for piece in x.split(rows)])


@cache
def steady_layout(
    num_out: int, size: int, dtype: torch.dtype, num_threads: int
) -> tuple[Callable[[Tensor], Layout], RowSpan]:
    """The layout for weights of a shape on this machine, and the numbers of rows that agree in their products.

    oneDNN takes up to twice the time of torch's own product of a small weight, which it reads by columns, where both
    agree from few rows to many.
    """
    if dtype is torch.float32 and 4 * num_out * size <= cpu.SMALL_NBYTES and cpu.FEW_ROWS:
        span = agreeing_rows(_columns, num_out, size, dtype, num_threads)
        if span.least <= FEW_ROWS and span.most == MOST_ROWS:
            return _columns, span
    return _packed, agreeing_rows(_packed, num_out, size, dtype, num_threads)


def agreeing_rows(
    layout: Callable[[Tensor], Layout], num_out: int, size: int, dtype: torch.dtype, num_threads: int
) -> RowSpan:
    """Numbers of rows that agree in products with weights of a shape in a ``layout``, found by trying them.

    Takes as long as some hundred rows of products. ``num_threads`` are those of the calling thread.
    """
    assert num_threads == torch.get_num_threads()
    numbers = sorted({padded_rows(number, torch.device("cpu")) for number in range(1, MOST_ROWS + 1)})
    x, plain = _telling_operands(MOST_ROWS + max(SHIFTS), num_out, size, dtype)
    weight = layout(plain)
    found = {(n, shift): _product(x[shift : shift + n].clone(), weight, None) for n in numbers for shift in SHIFTS}

    def agree(most: int, number: int) -> bool:
        return all(
            torch.equal(found[number, shift][: most - shift], found[most, 0][shift : shift + number])
            for shift in SHIFTS
        )

    best = RowSpan(1, 1)  # a lone row has no neighbours
    for least in FEWEST_ROWS:
        for most in reversed(numbers):
            if (
                most >= least
                and most > best.most
                and all(agree(most, number) for number in numbers if least <= number <= most)
            ):
                best = RowSpan(least, most)
        if best.most >= ENOUGH_ROWS:
            break
    return best


def _telling_operands(num_rows: int, num_out: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a weight whose products are 0 but for rounding errors, which another order of sums changes entirely.

    Of sums that are large, 16 bits would hide most of these errors.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(size // 2, generator=generator)

    def halves(number: int, sign: float) -> Tensor:
        some = torch.randn(number, size // 2, generator=generator)
        return F.pad(torch.cat((some, sign * some[:, order]), dim=1), (0, size % 2)).to(dtype)

    return halves(num_rows, -1.0), halves(num_out, 1.0)


def _packed(weight: Tensor) -> Layout:
    return PackedWeight(cpu.reorder(weight), None) if cpu.can_pack(weight) else weight


def _columns(weight: Tensor) -> Layout:
    return Columns(weight.T.contiguous())


def _product(x: Tensor, weight: Layout, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Columns):
        out = torch.mm(x, weight.columns)
        return out if bias is None else out.add_(bias)
    return cpu.linear(x, weight, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)
