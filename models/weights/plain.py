"""Plain matrices of floats: checkpoints that nobody quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from .format import COLUMNS, ROWS, CheckpointTensor, Found

FLOATS = ("F32", "BF16", "F16")


class Plain:
    """The weight as one matrix ``[O, I]`` in the model's dtype."""

    name = "plain"
    tensors = (CheckpointTensor("weight", FLOATS, (ROWS, COLUMNS)),)
    is_streamed = False
    is_stacked = False

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat.empty``."""
        return torch.empty(rows, columns, dtype=dtype)

    def build(self, found: Found, dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat.build``."""
        return found["weight"].to(dtype)


PLAIN = Plain()
