"""Plain checkpoints that are quantized while they are read.

Codes are rounded to the nearest. Of 4 bits each group's range is the one of a few, from all of the largest value
downwards, that leaves the least square error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.linear import Float8Weight, IntegerWeight

from .codes import empty_float8, empty_integers, pack_halves
from .format import COLUMNS, ROWS, CheckpointTensor, Found
from .plain import FLOATS

GROUPS = (128, 64, 32)  # columns of a group of 4 bits: the first that divides the weight's
_CLIPS = tuple(1.0 - step / 20 for step in range(11))  # of the largest value
_PIECE = 2**22  # elements quantized at a time
_LARGEST_FLOAT8 = 448.0


class OnLoad(NamedTuple):
    """See the module. ``kind`` is "int8", "int4" or "fp8"."""

    kind: str

    @property
    def name(self) -> str:
        return f"{self.kind}, quantized while loading"

    @property
    def is_streamed(self) -> bool:
        """See ``WeightFormat.is_streamed``."""
        return True

    @property
    def is_stacked(self) -> bool:
        """See ``WeightFormat.is_stacked``."""
        return False

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """See ``WeightFormat.tensors``."""
        return (CheckpointTensor("weight", FLOATS, (ROWS, COLUMNS)),)

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> IntegerWeight | Float8Weight:
        """See ``WeightFormat.empty``."""
        if self.kind == "fp8":
            return empty_float8(rows, columns, blocks=False)
        bits, group = _shape(self.kind, columns)
        return empty_integers(rows, columns, bits, group, dtype, zeros=False, order=False)

    def build(self, found: Found, dtype: torch.dtype) -> IntegerWeight | Float8Weight:
        """See ``WeightFormat.build``."""
        weight = found["weight"]
        pieces = torch.split(weight, max(1, _PIECE // weight.shape[1]))
        if self.kind == "fp8":
            floats = [_float8(piece.float()) for piece in pieces]
            return Float8Weight(torch.cat([codes for codes, _ in floats]), torch.cat([scales for _, scales in floats]))
        bits, group = _shape(self.kind, weight.shape[1])
        found_codes = [_integers(piece.float(), bits, group, dtype) for piece in pieces]
        codes, scales = (torch.cat(parts) for parts in zip(*found_codes, strict=True))
        return IntegerWeight(codes, scales)


def _shape(kind: str, columns: int) -> tuple[int, int]:
    """Bits of a weight's codes, and columns of a group; 8 bits where no group of 4 divides the columns."""
    group = next((group for group in GROUPS if columns % group == 0), None)
    return (8, columns) if kind == "int8" or group is None else (4, group)


def _float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / _LARGEST_FLOAT8).clamp(min=1e-12)
    return (weight / scales).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn), scales


def _integers(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows in float32; scales are rounded to ``dtype`` before codes are chosen."""
    groups, most = weight.view(len(weight), -1, group), 2.0 ** (bits - 1) - 1
    largest = groups.abs().amax(2, keepdim=True).clamp(min=1e-6)
    best, scales = torch.full_like(largest, torch.inf), largest
    for clip in _CLIPS if bits == 4 else _CLIPS[:1]:
        tried = (largest * (clip / most)).to(dtype).float()
        values = (groups / tried).round_().clamp_(-most - 1, most).mul_(tried)
        error = (values - groups).square_().sum(2, keepdim=True)
        scales = torch.where(error < best, tried, scales)
        best = torch.minimum(error, best)
    codes = (groups / scales).round_().clamp_(-most - 1, most).flatten(1)
    kept = scales.squeeze(2).to(dtype)
    return (codes.to(torch.int8), kept) if bits == 8 else (pack_halves((codes + 8).to(torch.uint8)), kept)
