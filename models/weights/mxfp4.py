"""MXFP4: floats of 4 bits (e2m1) in blocks of 32 columns, each with a power of two for a scale (e8m0).

Read as gpt-oss writes its experts: a byte has two values, the one of the lower column in its low half, and a scale
stores its exponent plus 127. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qkv_engine.errors import ModelError
from qkv_engine.kernels.linear import Float4Weight
from qkv_engine.kernels.linear.codes import FLOAT4_GROUP

from .codes import empty_float4
from .format import ROWS, CheckpointTensor, Dim, Found

_NO_NUMBER = 255  # of scales


@dataclass(frozen=True)
class Mxfp4:
    """See the module."""

    name = "MXFP4"
    is_streamed = False
    is_stacked = True

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """See ``WeightFormat.tensors``."""
        blocks = Dim("columns", FLOAT4_GROUP)
        return (
            CheckpointTensor("blocks", ("U8",), (ROWS, blocks, Dim(None, size=FLOAT4_GROUP // 2))),
            CheckpointTensor("scales", ("U8",), (ROWS, blocks)),
        )

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Float4Weight:
        """See ``WeightFormat.empty``."""
        return empty_float4(rows, columns)

    def build(self, found: Found, dtype: torch.dtype) -> Float4Weight:
        """See ``WeightFormat.build``. Raises ``ModelError`` for a scale that is no number."""
        if bool((found["scales"] == _NO_NUMBER).any()):
            raise ModelError(f"has a scale of {_NO_NUMBER}, which is no number")
        return Float4Weight(found["blocks"].flatten(1), found["scales"])
