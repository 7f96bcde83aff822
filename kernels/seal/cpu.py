"""Sealing in vectorised torch: a block at a time, which stays in cache, with the sides of all its layers at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bits import narrow, pack
from ..layout import BlockLayout, DenseSide, UniformSide
from ..pages import even_runs, meta_tile, packed_codes, read_dense, run_rows, tops
from .reference import LIMIT, round_down, round_up


def seal_cpu(
    memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout, finite: Tensor
) -> None:
    """See ``seal``."""
    pairs = source.pairs(target).items()
    runs = [(old, new, run) for (old, new), members in pairs for run in even_runs(members)]
    for index, (a, b) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        for old, new, run in runs:
            if isinstance(old, DenseSide):
                rows, out = run_rows(memory, a, b, run, old, new)
                dense = read_dense(rows, old)
                if isinstance(new, UniformSide):
                    is_finite = _seal(dense, out, new)
                else:
                    out.copy_(rows)
                    is_finite = bool(dense.isfinite().all())
                if not is_finite:
                    finite[index] = 0


def _seal(dense: Tensor, out: Tensor, side: UniformSide) -> bool:
    """Codes and metadata of ``dense`` [n, H, T, D] into ``out`` [n, nbytes] uint8; whether all values are finite."""
    x = torch.empty(dense.shape, dtype=torch.float32).copy_(dense)
    groups, dim = _groups(x, side), 3 if side.axis == "channel" else 4
    bounds = [_bounds(part, dim) for part in groups]
    finite = True
    # A NaN fails every comparison, so the passes that look at each value are only taken when a bound is off.
    if not all(bool(((low >= -LIMIT) & (high <= LIMIT)).all()) for low, high in bounds):
        finite = bool(x.isfinite().all())
        x.nan_to_num_(0.0, 0.0, 0.0).clamp_(-LIMIT, LIMIT)
        bounds = [_bounds(part, dim) for part in groups]
    metas = [_quantize(part, *ends, side.bits).squeeze(dim + 1) for part, ends in zip(groups, bounds, strict=True)]
    _store_codes(x.to(torch.int16).to(torch.uint8), packed_codes(out, side), side)
    _store_meta(torch.cat(metas, -1) if len(metas) > 1 else metas[0], out, side)
    return finite


def _groups(x: Tensor, side: UniformSide) -> list[Tensor]:
    """``x`` [n, H, T, D] as [n, H, groups, group, D] or [n, H, T, groups, group]; a smaller last group comes alone."""
    if side.axis == "channel":
        return [x.unflatten(2, (side.num_groups, side.group))]
    rest = side.head_dim % side.group
    parts = x.split([side.head_dim - rest, rest], 3) if rest else (x,)
    return [part.unflatten(3, (-1, size)) for part, size in zip(parts, (side.group, rest), strict=False)]


def _bounds(part: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)


def _quantize(part: Tensor, least: Tensor, most: Tensor, bits: int) -> Tensor:
    """Replaces values by their codes of 8 or 3 bits; see ``reference.quantize``. Returns (min, range) [2, ...] fp16."""
    low = round_down(least)
    start = low.float()
    span = round_up(most.sub_(start))
    divisor = span.float()
    divisor.masked_fill_(divisor == 0, 1)
    part.sub_(start).mul_(7 if bits == 3 else 255).div_(divisor).round_()
    return torch.stack((low, span))


def _store_codes(codes: Tensor, out: Tensor, side: UniformSide) -> None:
    """Shapes:  codes [n, H, T, D] uint8, of 3 bits or else 8;  out [n, H, T * bits / 8 * D] uint8"""
    tile = codes if side.side == "k" else codes.mT
    if side.bits == 8:
        out.unflatten(-1, tile.shape[-2:]).copy_(tile)
    elif side.bits == 3:
        out.copy_(pack(codes, 3, side.side))
    else:
        narrow(tile.flatten(-2), 8, side.bits, side.side, side.num_tokens, out)


def _store_meta(meta: Tensor, out: Tensor, side: UniformSide) -> None:
    """Shapes:  meta [2, n, H, num_groups, D] or [2, n, H, T, num_groups] fp16;  out [n, nbytes] uint8"""
    tile = meta_tile(out, side)
    if side.axis == "token":
        meta = meta.mT.unflatten(-1, tile.shape[-2:])
    tile.copy_(meta)
    tops(out, side).copy_(meta[1].flatten(2).amax(-1))
