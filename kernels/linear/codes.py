"""Containers of quantized weights: codes and scales, in rows of the output as plain matrices have them.

The value of a code is ``(code - zero) * scale``. Rows of several projections are stacked, so that a product reads one
container; a scale that a whole tensor shares stands in each of its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ZERO_4_BIT = 8  # the code that means zero where a 4-bit weight is symmetric
BLOCK = 128  # rows and columns of a block with one scale, in 8-bit floats
FLOAT4_GROUP = 32  # columns of a row with one scale, in 4-bit floats
FLOAT4_BIAS = 127  # of the exponents that are the scales of 4-bit floats
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; the fourth bit is the sign


class IntegerWeight(NamedTuple):
    """A weight [O, I] of integer codes of 8 or 4 bits, with a scale for each group of columns of a row.

    ``codes`` of 8 bits are int8 [O, I]; of 4 bits uint8 [O, I / 2], from 0 to 15, column 2 j in the low half of byte j.
    ``scales`` [O, I / group] have the dtype of activations; one group of I columns is a channel.
    ``zeros`` uint8 [O, I / group] are the codes that mean zero; ``None``: 8 does in 4 bits, and 0 in 8 bits,
    which have no zeros.
    ``order`` int32 [I]: column j of the codes multiplies ``x[:, order[j]]``; ``None``: they are in order.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.codes.dtype is torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight, ``(O, I)``."""
        rows, stored = self.codes.shape
        return rows, stored * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]


class Float8Weight(NamedTuple):
    """A weight [O, I] of 8-bit floats, with a scale for each row or for each block of 128 x 128.

    Shapes:  codes float8_e4m3fn [O, I];  scales float32 [O, 1], or [ceil(O / 128), ceil(I / 128)]
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight, ``(O, I)``."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def is_blockwise(self) -> bool:
        """Whether scales are those of blocks."""
        return self.scales.shape != (self.codes.shape[0], 1)


class Float4Weight(NamedTuple):
    """A weight [O, I] of 4-bit floats (e2m1), with a power of two for 32 columns of a row (e8m0): MXFP4.

    ``codes`` uint8 [O, I / 2], column 2 j in the low half of byte j: ``FLOAT4_VALUES``, from 8 on those negated.
    ``scales`` uint8 [O, I / 32] are exponents plus ``FLOAT4_BIAS``; 255, which stands for no number, does not occur.
    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight, ``(O, I)``."""
        rows, stored = self.codes.shape
        return rows, 2 * stored
