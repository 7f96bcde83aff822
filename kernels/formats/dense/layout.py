"""Dense sides: unquantized K and V elements in bf16, fp16 or fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..family import PageShape, Side, SideName

if TYPE_CHECKING:
    import torch


class DenseSpec(NamedTuple):
    """Compile-time layout of a dense side. ``STORED``: Triton dtype of the elements."""

    STORED: Any


@dataclass(frozen=True)
class DenseSide(Side):
    """One side of a page as ``[H, T, D]`` elements of ``dtype``, token rows contiguous; no metadata."""

    dtype: torch.dtype

    @property
    def codes_nbytes(self) -> int:
        return self.shape.num_kv_heads * self.shape.num_tokens * self.shape.head_dim * self.dtype.itemsize

    @property
    def meta_nbytes(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes without padding: a page of fewer tokens is smaller in proportion."""
        return self.codes_nbytes

    @property
    def dense_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def spec(self) -> DenseSpec:
        from .triton import TL_DTYPE

        return DenseSpec(TL_DTYPE[self.dtype])


@dataclass(frozen=True)
class Dense:
    """The format of unquantized elements of ``dtype``."""

    name: str
    dtype: torch.dtype

    @property
    def bits(self) -> float:
        return 8.0 * self.dtype.itemsize

    def layout(self, shape: PageShape, side: SideName) -> DenseSide:
        return DenseSide(side, shape, self.dtype)


def dense_formats(dtype: torch.dtype) -> dict[str, Dense]:
    """``dense16`` and ``dense32``. An fp16 model has fp16 pages; bf16 would lose three bits of the mantissa."""
    import torch

    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    return {"dense16": Dense("dense16", half), "dense32": Dense("dense32", torch.float32)}


def check_step(old: Side, new: DenseSide) -> None:
    """Raises ``ValueError`` unless both are dense in one dtype."""
    if old.dense_dtype is None:
        raise ValueError("a sealed side cannot become dense again")
    if old.dense_dtype != new.dtype:
        raise ValueError("a dense side keeps its dtype")
