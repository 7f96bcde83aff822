"""Graded sides in vectorised torch: sealing, demotion, and attention on the bare codes of each run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..family import CpuOps, SideBytes
from ..uniform import UniformSide
from ..uniform.codes import code_planes, narrow, token_factors
from ..uniform.cpu import seal as seal_uniform
from ..uniform.reference import calibrated, head_codes, meta_tile, tops
from .layout import MEAN_BITS, GradedSide
from .reference import code_sets, dequantize, head_metas, mean_values, means, pairs


def seal(dense: Tensor, out: SideBytes, side: GradedSide) -> bool:
    """Codes and metadata of ``dense`` [n, H, T, D], by way of 8 bits; whether all values are finite."""
    wide = side.uniform(8)
    rows = SideBytes(*(out.codes.new_empty(len(dense), size) for size in (wide.codes_nbytes, wide.meta_nbytes)))
    finite = seal_uniform(dense, rows, wide)
    demote(rows, out, wide, side)
    return finite


def demote(rows: SideBytes, out: SideBytes, old: UniformSide, new: GradedSide) -> None:
    """The bytes of uniform sides of 8 or 4 bits as graded sides, packed words to packed words."""
    first, coded = 0, new.coded
    for target, run in zip(code_sets(out, new), new.runs, strict=True):
        _shrink(_channels(rows, old, first, first + run.channels), old, run.bits, target)
        first += run.channels
    low, span = meta_tile(rows, old).squeeze(3)
    mean = mean_values(_sums(rows, old, coded), low[..., coded:], span[..., coded:], new)
    head_metas(out, new).copy_(torch.cat((low[..., :coded], span[..., :coded], mean), -1))
    tops(out, new).copy_(span[..., :coded].amax(-1))


def scores(q: Tensor, rows: SideBytes, side: GradedSide) -> Tensor:
    """logits_t = sum_d (q_d step_d) code_td + sum_d q_d min_d + sum_d q_d mean_d, d with codes and without."""
    *coded, rest = q.split([*(run.channels for run in side.runs), side.shape.head_dim - side.coded], -1)
    out = rest @ means(rows, side).float().unsqueeze(-1)
    for part, (run, planes, low, span) in zip(coded, _runs(rows, side), strict=True):
        products = (part * span) @ planes.flatten(2, 3).mT
        out = products.mul_(token_factors(run.bits, side.shape.num_tokens)).add_(out).add_((part * low).sum(-1, True))
    return out


def values(p: Tensor, rows: SideBytes, side: GradedSide) -> Tensor:
    """out_d = step_d sum_t p_t code_td + min_d sum_t p_t of channels with codes, mean_d sum_t p_t of others."""
    total, parts = p.sum(-1, True), []
    for run, planes, low, span in _runs(rows, side):
        inputs = p * token_factors(run.bits, side.shape.num_tokens)
        products = inputs.unflatten(3, (planes.shape[2], -1)).transpose(2, 3) @ planes.mT
        parts.append(products.sum(2).mul_(span).add_(total * low))
    return torch.cat([*parts, total * means(rows, side).float().unsqueeze(2)], -1)


GRADED_CPU = CpuOps(seal, demote, lambda rows, side, dtype: dequantize(rows, side).to(dtype), scores, values)


def _channels(rows: SideBytes, side: UniformSide, first: int, last: int) -> Tensor:
    """Packed codes of channels ``first`` to ``last - 1``: [n, H, T * bits / 8 * channels] uint8."""
    packed, lanes = head_codes(rows, side), side.shape.num_tokens * side.bits // 8
    if side.name == "k":
        return packed.unflatten(-1, (lanes, -1))[..., first:last].flatten(-2)
    return packed[..., first * lanes : last * lanes]


def _shrink(packed: Tensor, old: UniformSide, bits: int, out: Tensor) -> None:
    """Packed codes of the width of ``old`` as codes of ``bits`` in ``out``."""
    if bits == old.bits:
        out.copy_(packed)
    else:
        narrow(packed, old.bits, bits, old.name, old.shape.num_tokens, out)


def _sums(rows: SideBytes, side: UniformSide, first: int) -> Tensor:
    """Sums over tokens of the 4-bit codes of the channels from ``first`` on: [n, H, D - first] int32."""
    packed = _channels(rows, side, first, side.shape.head_dim)
    if not packed.numel():
        return packed.new_empty(*packed.shape[:-1], 0, dtype=torch.int32)
    codes = packed.new_empty(*packed.shape[:-1], packed.shape[-1] * MEAN_BITS // side.bits)
    _shrink(packed, side, MEAN_BITS, codes)
    lanes = side.shape.num_tokens * MEAN_BITS // 8
    tile = codes.unflatten(-1, (lanes, -1) if side.name == "k" else (-1, lanes))
    dim = 2 if side.name == "k" else 3
    return (tile & 15).sum(dim, dtype=torch.int32) + (tile >> 4).sum(dim, dtype=torch.int32)


def _runs(rows: SideBytes, side: GradedSide) -> Iterator[tuple[UniformSide, Tensor, Tensor, Tensor]]:
    """Each run: its uniform side, its ``code_planes`` in float32, (low, span) of its channels [n, H, 1, channels]."""
    metas = pairs(rows, side).split([run.channels for run in side.runs], -1)
    for run, packed, meta in zip(side.run_sides, code_sets(rows, side), metas, strict=True):
        planes = code_planes(packed, run.bits, side.name, side.shape.num_tokens).float()
        yield run, planes, *calibrated(meta, run).unsqueeze(3)
