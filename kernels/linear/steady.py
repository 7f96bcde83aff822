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
FEW_ROWS = 2  # computed in half of oneDNN's time with small weights, which are kept twice then
SHIFTS = (0, 1, 3)  # places of a row in the products that are compared
DIVIDED_ELEMENTS = 2**15  # from here on torch divides an elementwise operator among threads, in the middle of rows


class RowSpan(NamedTuple):
    """Products of ``least`` to ``most`` rows give a row the same bits, in any place.

    ``has_few``: so does torch's own product of ``FEW_ROWS`` with a transposed weight.
    """

    least: int
    most: int
    has_few: bool = False


class SteadyWeight(NamedTuple):
    """A weight [O, I] whose products do not depend on the number of rows. On a GPU any number may be computed at once.

    ``span``: numbers of rows that agree on the CPU;  ``columns`` [I, O]: the same weight for few rows, if they agree.
    """

    weight: Tensor | PackedWeight
    span: RowSpan | None
    columns: Tensor | None = None


def pack_steadily(weight: object) -> SteadyWeight:
    """A plain ``weight`` [O, I] in the fastest layout whose products do not depend on the number of rows.

    On the CPU they agree as long as products are computed with as many threads as the caller has now.
    """
    assert isinstance(weight, Tensor), "quantized weights are unpacked, or refused"
    if weight.is_cuda:
        return SteadyWeight(weight, None)
    rows, size = weight.shape
    span = agreeing_rows(rows, size, weight.dtype, torch.get_num_threads())
    return SteadyWeight(_packed(weight), span, weight.detach().T.contiguous() if span.has_few else None)


def linear(x: Tensor, weight: SteadyWeight, bias: Tensor | None) -> Tensor:
    """Same contract as ``qkv_engine.kernels.linear.linear``."""
    if weight.span is None:
        from .steady_triton import linear_steady

        assert isinstance(weight.weight, Tensor)
        return linear_steady(x, weight.weight, bias)
    if weight.columns is not None and len(x) <= FEW_ROWS:
        return _product_of_few(x, weight.columns, bias)
    least, most, _ = weight.span
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
    x, plain = _telling_operands(MOST_ROWS + max(SHIFTS), num_out, size, dtype)
    weight = _packed(plain)
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
    few = dtype is torch.float32 and plain.nbytes <= cpu.SMALL_NBYTES and best.most > 1
    return best._replace(has_few=few and _few_agree(x[: best.most], weight, plain))


def _few_agree(x: Tensor, weight: Tensor | PackedWeight, plain: Tensor) -> bool:
    columns, bias = plain.T.contiguous(), plain[:, 0].contiguous()
    for some in (None, bias):
        expected = _product(x, weight, some)
        for first in range(0, len(x) - FEW_ROWS, 5):
            for rows in (slice(first, first + FEW_ROWS), slice(first, first + 1)):
                if not torch.equal(_product_of_few(x[rows].clone(), columns, some), expected[rows]):
                    return False
    return True


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


def _packed(weight: Tensor) -> Tensor | PackedWeight:
    return PackedWeight(cpu.reorder(weight), None) if cpu.can_pack(weight) else weight


def _product_of_few(x: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """At most ``FEW_ROWS`` rows times ``columns`` [I, O]: always as many, since a lone row has a kernel of its own."""
    rows = x if len(x) == FEW_ROWS else F.pad(x, (0, 0, 0, FEW_ROWS - len(x)))
    out = rows @ columns
    return (out if bias is None else out.add_(bias))[: len(x)]


def _product(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    return cpu.linear(x, weight, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)
