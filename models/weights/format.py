"""What a weight format is: the tensors that a checkpoint has of a weight, and how the weight is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.linear import Weight, weight_nbytes

Found = Mapping[str, Tensor]  # tensors of a checkpoint by the ends of their names


class Dim(NamedTuple):
    """A dimension of a stored tensor: rows of the weight, its columns, or neither; ``per`` of them an element."""

    of: str | None
    per: int = 1


ROWS, COLUMNS = Dim("rows"), Dim("columns")


class CheckpointTensor(NamedTuple):
    """A tensor that a checkpoint has of each projection, under its name and a dot and ``suffix``."""

    suffix: str
    dtypes: tuple[str, ...]  # safetensors' names of those that are read
    dims: tuple[Dim, ...]


class WeightFormat(Protocol):
    """How a checkpoint stores the weights of linear layers. A format is a value: equal ones are alike."""

    @property
    def name(self) -> str:
        """The format's name, for people."""
        ...

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """What a checkpoint has of a projection."""
        ...

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Weight:
        """A weight ``[rows, columns]`` without values, for activations of ``dtype``."""
        ...

    def build(self, found: Found, dtype: torch.dtype) -> Weight:
        """The weight of the rows and columns whose part of each tensor is ``found``."""
        ...


def format_nbytes(each: WeightFormat, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of a weight ``[rows, columns]``."""
    with torch.device("meta"):
        return weight_nbytes(each.empty(rows, columns, dtype))
