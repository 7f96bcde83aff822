"""Integers of 8 or 4 bits as compressed-tensors writes them, in bytes (int-quantized) or words (pack-quantized).

A word has the code of its first column in its lowest bits, and codes are a value plus half of their range. Zero points
are packed alike, down the rows. Source of the layout: compressed-tensors' ``pack_to_int32``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv_engine.kernels.linear import IntegerWeight

from .codes import empty_integers, integer_weight, unpack_words
from .format import COLUMNS, ROWS, CheckpointTensor, Dim, Found
from .plain import FLOATS


class Integers(NamedTuple):
    """See the module. ``group`` columns of a row share a scale, ``None``: all; ``whole``: the tensor has one scale."""

    bits: int
    group: int | None
    packed: bool
    zeros: bool = False
    whole: bool = False

    @property
    def name(self) -> str:
        return f"int{self.bits}" if self.group is None else f"int{self.bits} in groups of {self.group}"

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
        per, groups = 32 // self.bits, Dim(None) if self.group is None else Dim("columns", self.group)
        found = [CheckpointTensor("weight_scale", FLOATS, (Dim(None),) if self.whole else (ROWS, groups))]
        if self.packed:
            found.append(CheckpointTensor("weight_packed", ("I32",), (ROWS, Dim("columns", per))))
        else:
            found.append(CheckpointTensor("weight", ("I8",), (ROWS, COLUMNS)))
        if self.zeros:
            found.append(CheckpointTensor("weight_zero_point", ("I32",), (Dim("rows", per), groups)))
        return tuple(found)

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> IntegerWeight:
        """See ``WeightFormat.empty``."""
        return empty_integers(rows, columns, self.bits, self.group, dtype, zeros=self.zeros, order=False)

    def build(self, found: Found, dtype: torch.dtype) -> IntegerWeight:
        """See ``WeightFormat.build``."""
        scales, zeros = found["weight_scale"], None
        codes = (
            unpack_words(found["weight_packed"], self.bits) if self.packed else found["weight"].view(torch.uint8) ^ 128
        )
        if self.whole:
            scales = scales.view(1, 1).expand(len(codes), 1)
        if self.zeros:
            zeros = unpack_words(found["weight_zero_point"].T, self.bits).T[: len(codes)]
        return integer_weight(codes, scales, zeros, self.bits, dtype)
