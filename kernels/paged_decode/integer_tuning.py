"""Launch parameters of the integer decode kernel."""

from __future__ import annotations

from typing import NamedTuple

from ..formats.family import Side

# By mean code bits of K and V, at most: (warps, stages). A page's address is itself fetched, so 5 stages hold two pages
# and 3 or 4 only one, which is enough where eight programs a multiprocessor keep the memory busy.
BY_BITS = ((3.0, 1, 5), (5.0, 1, 4), (6.0, 2, 3), (8.0, 2, 2))


class IntTuning(NamedTuple):
    """Launch parameters; ``tiles``: token tiles of a page, of which fewer and wider ones need more registers."""

    num_warps: int
    num_stages: int
    tiles: int


def int_tuning(k: Side, v: Side, block_g: int, min_tiles: int) -> IntTuning:
    """Parameters for pages of sides ``k`` and ``v`` with ``block_g`` padded query heads a KV head.

    ``min_tiles``: the larger of K's and V's fewest token tiles.
    """
    shape = k.shape
    bits = 4 * (k.codes_nbytes + v.codes_nbytes) / (shape.num_kv_heads * shape.num_tokens * shape.head_dim)
    num_warps, num_stages = next((w, s) for most, w, s in BY_BITS if bits <= most)
    if block_g > 4:  # the accumulators' registers: more warps, or four tiles of fewer rows each
        return IntTuning(num_warps * block_g // 8, 5 if num_warps == 1 else num_stages, 4)
    return IntTuning(num_warps, num_stages, min_tiles)
