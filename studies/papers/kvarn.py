"""KVarN by its own rules: tiles of 128 tokens, rotated, scaled to equal spread along both axes, then coded.

A tile x = H k over the channels is divided by a scale of each row and one of each column, so that all rows and all
columns have about the same standard deviation. Keys then have minimum and range per channel, values per token; both
are multiplied into the scale of that axis, so a tile keeps three vectors: x = (code * step + minimum) * scale.
Source:  KVarN (arXiv 2606.03458); constants and roundings as in huawei-csl/KVarN (ascend_kernel/kvarn_store_tile_k, its
reference) and its pull request to vllm-project/vllm (quantization/kvarn/sinkhorn.py, ops/kvarn_store.py and
kvarn_decode.py); the sizes of vectors as in sztlink/KVarN (quantization/kvarn/config.py)
Assumed:  the matrix is Sylvester's without random signs, and the rotated tile is float32, where the server's is fp16.
K2 V2, which the paper measures and the release has no preset for, is the same with other bits. The store's option of
ranges from quantile to quantile, off by default, is ``CLIPPED``. As released no scale is below 0.74, so values that are
small as such are not balanced; ``UNBOUNDED`` is the same rule without that bound, which no source has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cache import LayerCache, Side, Simulate
from .hadamard import META_BITS, hadamard, rotated

TILE = 128  # tokens that are coded together
SINK = 128  # first tokens of a sequence, never coded
ROUNDS = 16  # of scaling columns, then rows
LEAST_STD, MOST_STD = 1e-3, 1e3  # bounds of a standard deviation that a round divides by
MOST_LOG = 10.0  # of a scale
LEAST_STEP = 1e-10


class Variant(NamedTuple):
    """A form of the rule: the least logarithm of a scale, and the share of a row that is clipped at each end."""

    least_log: float = -0.3
    quantile: float = 0.0


RELEASED, CLIPPED, UNBOUNDED = Variant(), Variant(quantile=0.005), Variant(least_log=-20.0)


class Scales(NamedTuple):
    """Scales of the columns ``[..., 1, C]`` and of the rows ``[..., R, 1]`` of tiles."""

    columns: Tensor
    rows: Tensor


def balance(tiles: Tensor, variant: Variant = RELEASED, rounds: int = ROUNDS) -> Scales:
    """The scales of tiles ``[..., R, C]``: of all rounds those that leave deviations most alike, the last of equals.

    A round multiplies each scale by the deviation of what is left of its column, and then of its row.
    """
    logs = [torch.zeros_like(tiles[..., :1, :]), torch.zeros_like(tiles[..., :1])]
    best, least = Scales(*(log.exp() for log in logs)), imbalance(tiles)
    for _ in range(rounds):
        for number, axis in enumerate((-2, -1)):
            left = tiles / logs[0].exp() / logs[1].exp()
            spread = deviation(left, axis).clamp(LEAST_STD, MOST_STD)
            logs[number] = (logs[number] + spread.log()).clamp(variant.least_log, MOST_LOG)
        found = Scales(*(log.exp() for log in logs))
        now = imbalance(tiles / found.columns / found.rows)
        is_better = (now <= least)[..., None, None]
        best = Scales(*(torch.where(is_better, new, old) for new, old in zip(found, best, strict=True)))
        least = torch.minimum(now, least)
    return best


def imbalance(tiles: Tensor) -> Tensor:
    """Largest over smallest deviation of columns plus that of rows, ``[...]``; 2 where all are alike."""
    spreads = [deviation(tiles, axis).flatten(-2) for axis in (-2, -1)]
    return sum((s.amax(-1) / s.amin(-1).clamp(min=1e-8) for s in spreads), start=torch.zeros(()))


def deviation(x: Tensor, axis: int) -> Tensor:
    """Standard deviation along ``axis``, which stays with length 1; in sums, as torch's own takes ten times as long."""
    return ((x - x.mean(axis, keepdim=True)).square().sum(axis, keepdim=True) / (x.shape[axis] - 1)).sqrt()


def code(tiles: Tensor, bits: int, variant: Variant = RELEASED) -> Tensor:
    """Tiles ``[..., R, C]``, coded with a step and a minimum of each row, as they are read: from fp16 vectors."""
    scales, top = balance(tiles, variant), 2**bits - 1
    balanced = tiles / scales.columns / scales.rows
    low, high = ends(balanced, variant.quantile)
    step = ((high - low) / top).clamp(min=LEAST_STEP)
    codes = ((balanced - low) / step).round().clamp(0, top)
    step, low, columns = (x.half().float() for x in (scales.rows * step, scales.rows * low, scales.columns))
    found: Tensor = (codes * step + low) * columns
    return found


def ends(rows: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of rows ``[..., R, C]``, or the quantiles in their place, ``[..., R, 1]``."""
    if not quantile:
        return rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    return rows.quantile(quantile, -1, keepdim=True), rows.quantile(1 - quantile, -1, keepdim=True)


def keys(bits: int, variant: Variant = RELEASED) -> Simulate:
    """Keys ``[H, n, D]`` of whole tiles, quantized and dequantized: rows are channels."""
    return _simulate(lambda tiles: code(tiles.mT, bits, variant).mT)


def values(bits: int, variant: Variant = RELEASED) -> Simulate:
    """Values ``[H, n, D]`` of whole tiles, quantized and dequantized: rows are tokens."""
    return _simulate(lambda tiles: code(tiles, bits, variant))


def _simulate(of_tiles: Simulate) -> Simulate:
    def of_heads(x: Tensor) -> Tensor:
        tiles = rotated(of_tiles, hadamard(x.shape[2]))
        return tiles(torch.unflatten(x, 1, (-1, TILE))).flatten(1, 2)

    return of_heads


def element_bits(k_bits: int, v_bits: int, head_dim: int) -> float:
    """Bits of an element, mean of K and V: codes; step and minimum of K's channels or V's tokens; the other scale."""
    k_vectors, v_vectors = 2 * head_dim + TILE, head_dim + 2 * TILE
    return (k_bits + v_bits + (k_vectors + v_vectors) * META_BITS / (TILE * head_dim)) / 2


def layer(k_bits: int, v_bits: int, variant: Variant = RELEASED) -> LayerCache:
    """A layer's cache: a tile is coded as soon as it is full."""
    simulated = keys(k_bits, variant), values(v_bits, variant)
    k, v = (Side(lambda full: full // TILE * TILE, simulate, SINK) for simulate in simulated)
    return LayerCache(k, v)
