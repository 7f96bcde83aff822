"""Matrix product of a linear layer.

``pack_weight`` is called once per layer after loading; ``linear`` then picks the back end by the weight's
type, so that a packed weight and a plain one are used in the same way. On a GPU few rows have kernels of their own.
``pack_steadily`` takes its place in a deterministic engine: rows then have the same bits whatever is beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..swiglu import swiglu
from . import codes_reference, cpu, steady
from .codes import Float4Weight, Float8Weight, IntegerWeight
from .cpu import PackedWeight
from .packed import PackedCodes, can_pack, pack
from .packed import unpack as unpack_codes  # ``unpack`` is a module here
from .padding import padded_rows
from .split_sums import Addend, LateProduct, SplitSums
from .steady import SteadyWeight, by_rows, pack_steadily

if TYPE_CHECKING:
    from .float8_rows import Float8Rows

MANY_ROWS = 1024  # of x, from which on a product that reads the residual takes no longer, and the norm moves half
# What a linear layer may hold.
Weight = Tensor | PackedWeight | IntegerWeight | Float8Weight | Float4Weight | PackedCodes | SteadyWeight


def pack_weight(weight: Weight) -> Weight:
    """Weight ``[O, I]`` in the layout of the fastest ``linear``; the same tensor where there is none.

    A packed weight can be used by ``linear`` alone.
    """
    if isinstance(weight, IntegerWeight | Float8Weight | Float4Weight):
        return pack(weight) if weight.codes.is_cuda and can_pack(weight) else weight
    return cpu.pack_weight(weight) if isinstance(weight, Tensor) and cpu.can_pack(weight) else weight


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The plain matrix ``[O, I]`` of a weight in any layout but the CPU's, which cannot be undone."""
    assert not isinstance(weight, PackedWeight | SteadyWeight)
    if isinstance(weight, PackedCodes):
        weight = unpack_codes(weight)
    return (weight if isinstance(weight, Tensor) else codes_reference.dequantize(weight)).to(dtype)


def reads_rows(x: Tensor, weight: Weight | None) -> bool:
    """Whether ``linear`` of ``x`` and ``weight`` quantizes rows of ``x``, and so takes them as ``Float8Rows``, too."""
    if not (isinstance(weight, PackedCodes) and x.is_cuda):
        return False
    from .float8 import takes_rows

    return takes_rows(x, weight)


def linear(x: Tensor | Float8Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Shapes: x [M, I]; weight [O, I], plain or from ``pack_weight``; bias [O]; result [M, O]; one dtype.
    Rows of 8-bit floats, where ``reads_rows``, give what the rows that they were made of do.
    On a GPU ``weight`` and ``bias`` may be read while the kernel before still runs: that kernel must not write them.
    """
    if not isinstance(x, Tensor):
        from .float8 import linear_rows

        assert isinstance(weight, PackedCodes)
        return linear_rows(x, weight, bias)
    if isinstance(weight, PackedWeight):
        return cpu.linear(x, weight, bias)
    if isinstance(weight, SteadyWeight):
        return steady.linear(x, weight, bias)
    if not isinstance(weight, Tensor):
        return _linear_codes(x, weight, bias, gated=False)
    if x.is_cuda:
        from .triton import can_stream, linear_few_rows

        if can_stream(x, weight):
            return linear_few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_sums(x: Tensor | Float8Rows, weight: Weight, bias: Tensor | None = None) -> Tensor | SplitSums:
    """``linear`` for ``add_rms_norm``: where that is faster, a product whose splits the norm adds up.

    ``SteadyWeight`` gives no splits, so that a deterministic engine's rows keep their bits.
    """
    if isinstance(weight, Tensor) and isinstance(x, Tensor) and x.is_cuda:
        from .triton import can_split, linear_splits

        if can_split(x, weight):
            return linear_splits(x, weight, bias)
    return linear(x, weight, bias)


def linear_addend(x: Tensor | Float8Rows, weight: Weight, bias: Tensor | None = None) -> Addend:
    """``linear`` for a norm that adds it to the residual: in splits, or not yet computed, where that is faster."""
    is_late = bias is None and not torch.is_grad_enabled()
    if is_late and isinstance(weight, Tensor) and isinstance(x, Tensor) and x.is_cuda and len(x) >= MANY_ROWS:
        return LateProduct(x, weight)
    return linear_sums(x, weight, bias)


def linear_swiglu(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``swiglu(linear(x, weight, bias))``, its bits and roundings.

    Shapes: x [M, I]; weight [2 O, I], gate's rows then up's; bias [2 O]; result [M, O]. Otherwise as ``linear``.
    """
    if isinstance(weight, PackedCodes):
        return _linear_codes(x, weight, bias, gated=True)
    if isinstance(weight, SteadyWeight):
        return steady.linear_swiglu(x, weight, bias)
    if x.is_cuda and isinstance(weight, Tensor):
        from .triton import can_stream, linear_few_rows

        if can_stream(x, weight):
            return linear_few_rows(x, weight, bias, gated=True)
    return swiglu(linear(x, weight, bias))


def linear_swiglu_for(
    reader: Weight, x: Tensor | Float8Rows, weight: Weight, bias: Tensor | None = None
) -> Tensor | Float8Rows:
    """``linear_swiglu``; of rows of 8-bit floats in such rows, too, where ``reads_rows`` of ``reader`` would be true.

    The product with ``reader`` is all that may read the result.
    """
    if isinstance(x, Tensor):
        return linear_swiglu(x, weight, bias)
    from .float8 import linear_rows_gated

    assert isinstance(weight, PackedCodes)
    return linear_rows_gated(x, weight, bias, reader if isinstance(reader, PackedCodes) else None)


def _linear_codes(x: Tensor, weight: Weight, bias: Tensor | None, *, gated: bool) -> Tensor:
    """The product with a quantized weight: by kernels for activations of 16 bits, otherwise with the plain matrix."""
    if isinstance(weight, PackedCodes) and x.dtype.itemsize == 2:
        from .float8 import linear_float8
        from .integer import linear_integer

        product = linear_float8 if weight.kind == "float8" else linear_integer
        return product(x, weight, bias, gated=gated)
    out = F.linear(x, dequantize(weight, x.dtype), bias)
    return swiglu(out) if gated else out


def packed_nbytes(weight: Weight) -> int:
    """Bytes of a weight as kernels read it, rows filled up where they ask for it; tensors may have no memory."""
    return weight_nbytes(pack(weight) if isinstance(weight, IntegerWeight | Float8Weight | Float4Weight) else weight)


def weight_nbytes(weight: Weight) -> int:
    """Bytes of a weight's tensors."""
    held = weight.weight if isinstance(weight, SteadyWeight) else weight
    parts = (held,) if isinstance(held, Tensor) else held
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


__all__ = [
    "Addend",
    "Float4Weight",
    "Float8Weight",
    "IntegerWeight",
    "LateProduct",
    "PackedCodes",
    "PackedWeight",
    "SplitSums",
    "SteadyWeight",
    "Weight",
    "by_rows",
    "dequantize",
    "linear",
    "linear_addend",
    "linear_sums",
    "linear_swiglu",
    "linear_swiglu_for",
    "pack_steadily",
    "pack_weight",
    "packed_nbytes",
    "padded_rows",
    "reads_rows",
    "weight_nbytes",
]
