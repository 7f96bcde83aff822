"""8-bit floats (e4m3) with a scale a tensor, a row, or a block of 128 x 128.

Read as compressed-tensors (float-quantized), fbgemm and the FP8 checkpoints of DeepSeek and Qwen write them: a value is
the float times the scale, which DeepSeek's name for it calls the inverse of the one quantized with. Activations are
not quantized, so scales of inputs have no use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv_engine.kernels.linear import Float8Weight
from qkv_engine.kernels.linear.codes import BLOCK

from .codes import empty_float8
from .format import COLUMNS, ROWS, CheckpointTensor, Dim, Found
from .plain import FLOATS

SCALE_DIMS: dict[str, tuple[Dim, ...]] = {
    "tensor": (Dim(None),),
    "channel": (ROWS, Dim(None)),
    "block": (Dim("rows", BLOCK), Dim("columns", BLOCK, may_be_part=True)),
}


class Float8(NamedTuple):
    """See the module. ``scale`` ends the name of the scales' tensor, ``strategy`` is a key of ``SCALE_DIMS``."""

    scale: str
    strategy: str

    @property
    def name(self) -> str:
        return f"fp8 by {self.strategy}"

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
        scales = CheckpointTensor(self.scale, FLOATS, SCALE_DIMS[self.strategy])
        return (CheckpointTensor("weight", ("F8_E4M3",), (ROWS, COLUMNS)), scales)

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Float8Weight:
        """See ``WeightFormat.empty``."""
        return empty_float8(rows, columns, blocks=self.strategy == "block")

    def build(self, found: Found, dtype: torch.dtype) -> Float8Weight:
        """See ``WeightFormat.build``."""
        codes, scales = found["weight"], found[self.scale].float()
        if self.strategy != "block":
            scales = scales.view(-1, 1).expand(len(codes), 1).contiguous()
        return Float8Weight(codes, scales)
