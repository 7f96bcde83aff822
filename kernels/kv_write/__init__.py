"""Writes new K and V rows into open blocks."""

from __future__ import annotations

from torch import Tensor


def kv_write(rows: Tensor, x: Tensor, out: Tensor) -> None:
    """``out[rows] = x``, converted to the pages' dtype.

    Shapes:  rows [N * H] int64, row numbers of ``out``;  x [N, H, D];  out [R, D], a view of the arena
    """
    out.index_copy_(0, rows, x.reshape(-1, x.shape[-1]).to(out.dtype))
