"""Pattern sides in vectorised torch: sealing, demotion, and attention on the residual's bare codes.

Patterns act on queries and weights. K adds the query's product with a token's pattern to the token's score; V adds each
pattern times the sum of the weights of the tokens that have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..family import LIMIT, CpuOps, SideBytes
from ..uniform import cpu as uniform
from ..uniform.layout import TILES
from .layout import PatternSide
from .reference import chosen, index_tile, read_index, read_patterns, residual_rows, split


def seal(dense: Tensor, out: SideBytes, side: PatternSide) -> bool:
    """Codes, indices and metadata of ``dense`` [n, H, T, D]; whether all values are finite."""
    x = dense.float()
    finite = bool(x.isfinite().all())
    if not finite:
        x = x.nan_to_num(0.0, 0.0, 0.0)
    x = x.clamp(-LIMIT, LIMIT)
    index, residual = split(x, read_patterns(out.bank, side), side)
    index_tile(out, side).copy_(index.unflatten(2, (TILES, -1)))
    uniform.seal(residual, residual_rows(out, side), side.residual)
    return finite


def demote(rows: SideBytes, out: SideBytes, old: PatternSide, new: PatternSide) -> None:
    """Packed words to packed words; the metadata is copied."""
    index_tile(out, new).copy_(index_tile(rows, old))
    uniform.demote(residual_rows(rows, old), residual_rows(out, new), old.residual, new.residual)


def dequantize(rows: SideBytes, side: PatternSide, dtype: torch.dtype) -> Tensor:
    """Elements [n, H, T, D]."""
    x = uniform.dequantize(residual_rows(rows, side), side.residual, torch.float32)
    return x.add_(chosen(read_patterns(rows.bank, side), read_index(rows, side))).to(dtype)


def scores(q: Tensor, rows: SideBytes, side: PatternSide) -> Tensor:
    """logits_t = q . residual_t + (q . pattern) of the token's index."""
    out = uniform.scores(q, residual_rows(rows, side), side.residual)
    patterns = read_patterns(_distinct(rows.bank), side)
    table = _distinct(q) @ patterns.mT if len(patterns) == 1 else q @ patterns.mT
    table = torch.cat((table, table.new_zeros(*table.shape[:3], 1)), 3).expand(len(q), -1, -1, -1)
    return out.add_(table.gather(3, _columns(rows, side, table.shape[3] - 1, q.shape[2])))


def values(p: Tensor, rows: SideBytes, side: PatternSide) -> Tensor:
    """out = sum_t p_t residual_t + sum_m (weights of the tokens with pattern m) pattern_m."""
    out = uniform.values(p, residual_rows(rows, side), side.residual)
    patterns = read_patterns(_distinct(rows.bank), side)
    number = patterns.shape[2]
    masses = p.new_zeros(*p.shape[:3], number + 1)
    masses.scatter_add_(3, _columns(rows, side, number, p.shape[2]), p)
    return out.add_(masses[..., :number] @ patterns)


def _distinct(x: Tensor | None) -> Tensor:
    """The first of equal rows that share one place in memory, so that they are converted and multiplied once."""
    assert x is not None
    return x if x.stride(0) else x[:1]


def _columns(rows: SideBytes, side: PatternSide, number: int, num_queries: int) -> Tensor:
    """Indices with ``number`` for no pattern, for every query: [n, H, G, T] int64."""
    return read_index(rows, side).long().clamp(max=number).unsqueeze(2).expand(-1, -1, num_queries, -1)


PATTERN_CPU = CpuOps(seal, demote, dequantize, scores, values)
