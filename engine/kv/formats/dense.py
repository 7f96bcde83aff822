"""Dense pages: every K and V element as it came, in bf16, fp16 or fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qkv_engine.kernels.layout import DenseSide, SideName

from . import PageShape


@dataclass(frozen=True)
class Dense:
    """One side of a page as ``[H, T, D]`` elements of ``dtype``, token rows contiguous."""

    name: str
    dtype: torch.dtype

    @property
    def bits(self) -> float:
        return 8.0 * self.dtype.itemsize

    def codes_nbytes(self, shape: PageShape) -> int:
        return shape.num_kv_heads * shape.num_tokens * shape.head_dim * self.dtype.itemsize

    def meta_nbytes(self, shape: PageShape) -> int:
        return 0

    def layout(self, shape: PageShape, side: SideName) -> DenseSide:
        return DenseSide(self.dtype, shape.num_kv_heads, shape.num_tokens, shape.head_dim, self.codes_nbytes(shape))
