"""What a weight format is: the tensors that a checkpoint has of a weight, and how the weight is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import Weight, packed_nbytes

from ..ranks import Part

Found = Mapping[str, Tensor]  # tensors of a checkpoint by the ends of their names


class Dim(NamedTuple):
    """A dimension of a stored tensor: rows of the weight, its columns, or neither; ``per`` of them an element.

    Ranks cannot have parts of an ``indivisible`` one. Of neither there are ``size`` elements. Columns must be whole
    elements unless the last one ``may_be_part``.
    """

    of: str | None
    per: int = 1
    indivisible: bool = False
    size: int = 1
    may_be_part: bool = False

    def of_part(self, rows: Part, columns: Part) -> Part | None:
        """The elements of a part of the weight; ``None`` if it has parts of elements."""
        if self.of is None:
            return Part.all(self.size)
        size, first, whole = rows if self.of == "rows" else columns
        stop, elements = first + size, -(-whole // self.per)
        if (first, stop) == (0, whole):
            return Part.all(elements)
        if self.indivisible or first % self.per or (stop % self.per and stop != whole):
            return None
        first //= self.per
        return Part(-(-stop // self.per) - first, first, elements)


ROWS, COLUMNS = Dim("rows"), Dim("columns")


class CheckpointTensor(NamedTuple):
    """A tensor that a checkpoint has of each projection, under its name and a dot and ``suffix``."""

    suffix: str
    dtypes: tuple[str, ...]  # safetensors' names of those that are read
    dims: tuple[Dim, ...]

    def parts(self, rows: Part, columns: Part) -> tuple[Part | None, ...]:
        """The elements of each dimension that a part of the weight has."""
        return tuple(dim.of_part(rows, columns) for dim in self.dims)


class QuantizedTensor(NamedTuple):
    """A tensor that the checkpoint must have; ``num_read`` of its elements are read."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    num_read: int


class WeightFormat(Protocol):
    """How a checkpoint stores weights of linear layers, or of experts. A format is a value: equal ones are alike."""

    @property
    def name(self) -> str:
        """The format's name, for people."""
        ...

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """What a checkpoint has of a projection."""
        ...

    @property
    def is_streamed(self) -> bool:
        """Whether it is made of a plain weight, of which some rows can be built at a time."""
        ...

    @property
    def is_stacked(self) -> bool:
        """Whether a tensor has the matrices of all experts of a layer."""
        ...

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Weight:
        """A weight ``[rows, columns]`` without values, for activations of ``dtype``."""
        ...

    def build(self, found: Found, dtype: torch.dtype) -> Weight:
        """The weight of the rows and columns whose part of each tensor is ``found``."""
        ...


def format_nbytes(each: WeightFormat, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of a weight ``[rows, columns]``, as kernels read it."""
    with torch.device("meta"):
        return packed_nbytes(each.empty(rows, columns, dtype))


def split_parts(name: str, each: CheckpointTensor, rows: Part, columns: Part) -> tuple[Part, ...]:
    """The elements of each dimension of a tensor that a part of the weight has.

    Raises ``ModelError`` with ``name`` where it would have a part of an element, or the weight's columns do not fill
    the last one.
    """
    for dim in each.dims:
        if dim.of == "columns" and columns.whole % dim.per and not dim.may_be_part:
            raise ModelError(f"{name}: {columns.whole} columns are no whole number of blocks of {dim.per}")
    found = tuple(part for part in each.parts(rows, columns) if part is not None)
    if len(found) < len(each.dims):
        message = f"{name} cannot be split over the ranks: a part would have a part of a group, a word or an order"
        raise ModelError(message, remedy="Use fewer ranks, or none")
    return found
