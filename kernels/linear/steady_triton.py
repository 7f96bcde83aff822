"""Matrix products in Triton that give a row the same bits whatever rows are beside it.

Tiles of every size sum a column's products in the same order, sixteen at a time as tensor cores take them, so that the
number of rows may decide on the tile: few rows stream the weight, many share it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .triton import TileTuning, launch_tiles, tile_variant

# By the most rows that each serves; more rows take several tiles of the last one.
STEADY_TUNINGS: dict[int, TileTuning] = {
    8: TileTuning(block_m=8, block_n=32, block_k=256, num_warps=2, num_stages=5),
    16: TileTuning(block_m=16, block_n=32, block_k=256, num_warps=2, num_stages=5),
    32: TileTuning(block_m=32, block_n=32, block_k=128, num_warps=2, num_stages=5),
    64: TileTuning(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=5),
}
# Float32 has no matrix instructions: one tile for any number of rows, whose sums take every register.
FLOAT32_TUNING = TileTuning(block_m=64, block_n=32, block_k=32, num_warps=8, num_stages=2)


def linear_steady(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, tuning: TileTuning | None = None
) -> Tensor:
    """``linear``, or with ``gated`` ``linear_swiglu``; a row of the result has the same bits whatever is beside it."""
    (num_rows, size), num_out = x.shape, len(weight)
    x, out = x.contiguous(), x.new_empty(num_rows, num_out // 2 if gated else num_out)
    assert weight.is_contiguous() and weight.shape[1] == size
    if num_rows:
        constexprs, num_warps = steady_variant(num_rows, num_out, size, x.dtype.itemsize, gated=gated, tuning=tuning)
        launch_tiles(x, weight, bias, out, constexprs, num_warps)
    return out


def steady_variant(
    num_rows: int, num_out: int, size: int, itemsize: int, *, gated: bool = False, tuning: TileTuning | None = None
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for rows and a weight [num_out, size] of elements of ``itemsize`` bytes."""
    if tuning is None:
        last = max(STEADY_TUNINGS)
        most = min((most for most in STEADY_TUNINGS if num_rows <= most), default=last)
        tuning = FLOAT32_TUNING if itemsize == 4 else STEADY_TUNINGS[most]
    constexprs, num_warps = tile_variant(num_out, tuning)
    return {"K": size, "GATED": gated, **constexprs}, num_warps
