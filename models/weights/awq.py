"""AWQ's 4 bits (GEMM): words along the rows of the weight, which lies transposed.

Bits 4 i to 4 i + 3 of a word are row ``(0, 2, 4, 6, 1, 3, 5, 7)[i]`` of eight. Source of the layout: AutoAWQ's
``WQLinear_GEMM``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv_engine.kernels.linear import IntegerWeight

from .codes import empty_integers, integer_weight, unpack_words
from .format import COLUMNS, ROWS, CheckpointTensor, Dim, Found
from .plain import FLOATS

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows 0 to 7 in a word
_WORDS = Dim("rows", 8)


class Awq(NamedTuple):
    """See the module. ``group`` columns of a row share a scale."""

    group: int

    @property
    def name(self) -> str:
        return f"AWQ in groups of {self.group}"

    @property
    def is_streamed(self) -> bool:
        """See ``WeightFormat.is_streamed``."""
        return False

    @property
    def is_stacked(self) -> bool:
        """See ``WeightFormat.is_stacked``."""
        return False

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """See ``WeightFormat.tensors``."""
        groups = Dim("columns", self.group)
        return (
            CheckpointTensor("qweight", ("I32",), (COLUMNS, _WORDS)),
            CheckpointTensor("qzeros", ("I32",), (groups, _WORDS)),
            CheckpointTensor("scales", FLOATS, (groups, ROWS)),
        )

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> IntegerWeight:
        """See ``WeightFormat.empty``."""
        return empty_integers(rows, columns, 4, self.group, dtype, zeros=True, order=False)

    def build(self, found: Found, dtype: torch.dtype) -> IntegerWeight:
        """See ``WeightFormat.build``."""
        codes, zeros = (unpack_words(found[name], 4, _PLACES).T for name in ("qweight", "qzeros"))
        return integer_weight(codes, found["scales"].T, zeros, 4, dtype)
