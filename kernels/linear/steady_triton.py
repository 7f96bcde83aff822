"""Matrix products in Triton that give a row the same bits whatever rows are beside it.

Tiles of every size sum a column's products in the same order, sixteen at a time as tensor cores take them, so that the
number of rows may decide on the tile: few rows stream the weight, many share it.
"""

from __future__ import annotations

from torch import Tensor

from .triton import TileTuning, launch_tiles, tile_of, tile_variant

# Float32 has no matrix instructions: one tile for any number of rows, whose sums take every register.
FLOAT32_TILE = TileTuning(block_m=64, block_n=32, block_k=32, num_warps=8, num_stages=2)


def linear_steady(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, tuning: TileTuning | None = None
) -> Tensor:
    """``linear``, or with ``gated`` ``linear_swiglu``; a row of the result has the same bits whatever is beside it."""
    (num_rows, size), num_out = x.shape, len(weight)
    x, out = x.contiguous(), x.new_empty(num_rows, num_out // 2 if gated else num_out)
    assert weight.is_contiguous() and weight.shape[1] == size
    if num_rows:
        tuning = tuning or steady_tile(num_rows, num_out, x.dtype.itemsize)
        launch_tiles(x, weight, bias, out, *tile_variant(num_out, size, tuning, gated=gated))
    return out


def steady_tile(num_rows: int, num_out: int, itemsize: int) -> TileTuning:
    """The tile for rows of ``x`` and of the weight, whose elements take ``itemsize`` bytes."""
    return FLOAT32_TILE if itemsize == 4 else tile_of(num_rows, num_out)
