"""MXFP4: floats of 4 bits (e2m1) in blocks of 32 columns, each with a power of two for a scale (e8m0).

Read as gpt-oss writes its experts: a byte has two values, the one of the lower column in its low half, and a scale
stores its exponent plus 127. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qkv_engine.errors import ModelError

from .format import ROWS, CheckpointTensor, Dim, Found

_BLOCK = 32  # columns of a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; the fourth bit is the sign
_NO_NUMBER = 255  # of scales
_EXPONENT_OF_0 = 1023 - 127  # a float64's, of the scale that is stored as 0


@dataclass(frozen=True)
class Mxfp4:
    """See the module. Weights are dequantized while they are loaded: no product reads these codes."""

    name = "MXFP4"
    is_streamed = False

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """See ``WeightFormat.tensors``."""
        blocks = Dim("columns", _BLOCK)
        return (
            CheckpointTensor("blocks", ("U8",), (ROWS, blocks, Dim(None, size=_BLOCK // 2))),
            CheckpointTensor("scales", ("U8",), (ROWS, blocks)),
        )

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat.empty``."""
        return torch.empty(rows, columns, dtype=dtype)

    def build(self, found: Found, dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat.build``. Raises ``ModelError`` for a scale that is no number."""
        scales = found["scales"]
        if bool((scales == _NO_NUMBER).any()):
            raise ModelError(f"has a scale of {_NO_NUMBER}, which is no number")
        powers = ((scales.long() + _EXPONENT_OF_0) << 52).view(torch.float64).float()  # exact, subnormal ones too
        values = _pairs(scales.device)[found["blocks"].int()].flatten(2)
        return (values * powers[:, :, None]).flatten(1).to(dtype)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Float32 [256, 2]: the two values of each byte."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=device)
    codes = torch.arange(256, device=device)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=1)
