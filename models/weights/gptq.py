"""GPTQ's 4 and 8 bits, with and without act-order: words along the columns of the weight, which lies transposed.

The lowest bits of a word are its first column. Zeros are stored less 1, in newer files (gptq_v2) as they are. ``g_idx``
has the group of each column; with act-order columns are sorted by it here, and inputs are taken in that order. Source
of the layout: AutoGPTQ's ``QuantLinear``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import IntegerWeight

from .codes import empty_integers, integer_weight, unpack_words
from .format import ROWS, CheckpointTensor, Dim, Found
from .plain import FLOATS


class Gptq(NamedTuple):
    """See the module. ``group`` columns of a row share a scale, ``None``: all; ``symmetric``: half means zero."""

    bits: int
    group: int | None
    symmetric: bool
    act_order: bool
    stored_less: int = 1  # than a zero

    @property
    def name(self) -> str:
        return f"GPTQ of {self.bits} bits" + (" with act-order" if self.act_order else "")

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
        return (
            CheckpointTensor("qweight", ("I32",), (Dim("columns", per), ROWS)),
            CheckpointTensor("qzeros", ("I32",), (groups, Dim("rows", per))),
            CheckpointTensor("scales", FLOATS, (groups, ROWS)),
            CheckpointTensor("g_idx", ("I32",), (Dim("columns", indivisible=self.act_order),)),
        )

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> IntegerWeight:
        """See ``WeightFormat.empty``."""
        zeros = not self.symmetric
        return empty_integers(rows, columns, self.bits, self.group, dtype, zeros=zeros, order=self.act_order)

    def build(self, found: Found, dtype: torch.dtype) -> IntegerWeight:
        """See ``WeightFormat.build``."""
        codes = unpack_words(found["qweight"].T, self.bits)
        zeros = unpack_words(found["qzeros"], self.bits).T + self.stored_less
        if self.symmetric and not torch.equal(zeros, torch.full_like(zeros, 1 << (self.bits - 1))):
            raise ModelError("has zeros where its config.json says that it is symmetric")
        if not self.symmetric and int(zeros.max()) > 15:
            raise ModelError("has a zero of 16, which no code is")
        groups = found["g_idx"].long()
        groups = groups - groups.min()
        order, columns = None, torch.arange(codes.shape[1], device=groups.device)
        if self.act_order:
            groups, order = groups.sort(stable=True)
            codes = codes[:, order]
        if not torch.equal(groups, columns // (self.group or len(columns))):
            raise ModelError("has a g_idx of groups of other sizes or in another order than its config.json says")
        order = None if order is None else order.int()
        return integer_weight(codes, found["scales"].T, None if self.symmetric else zeros, self.bits, dtype, order)
