"""Uniform sides in vectorised torch: sealing, demotion, and attention on the bare codes.

With x = min + code * step, min and step act on queries, scores, probabilities or outputs, which are small, and never on
the elements of a page. Codes are only converted to float32 for the product.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from ..family import LIMIT, CpuOps, SideBytes
from .codes import code_planes, narrow, pack, token_factors
from .layout import UniformSide
from .reference import (
    calibrated,
    head_codes,
    meta_tile,
    read_codes,
    read_meta,
    round_down,
    round_up,
    spread,
    tops,
)

PIECE_ELEMENTS = 2**18  # codes a thread converts at a time: 1 MiB of float32, which fits its core's L2


def seal(dense: Tensor, out: SideBytes, side: UniformSide) -> bool:
    """Codes and metadata of ``dense`` [n, H, T, D]; whether all values are finite. See ``reference.quantize``."""
    x = torch.empty(dense.shape, dtype=torch.float32).copy_(dense)
    groups, dim = _groups(x, side), 3 if side.axis == "channel" else 4
    bounds = [_bounds(part, dim) for part in groups]
    finite = True
    # A NaN fails every comparison, so the passes over every value are only taken when a bound is off.
    if not all(bool(((low >= -LIMIT) & (high <= LIMIT)).all()) for low, high in bounds):
        finite = bool(x.isfinite().all())
        x.nan_to_num_(0.0, 0.0, 0.0).clamp_(-LIMIT, LIMIT)
        bounds = [_bounds(part, dim) for part in groups]
    metas = [_quantize(part, *ends, side.bits).squeeze(dim + 1) for part, ends in zip(groups, bounds, strict=True)]
    if not side.is_subordinate:
        _store_codes(x.to(torch.int16).to(torch.uint8), out, side)
    _store_meta(torch.cat(metas, -1) if len(metas) > 1 else metas[0], out, side)
    return finite


def demote(rows: SideBytes, out: SideBytes, old: UniformSide, new: UniformSide) -> None:
    """Packed words to packed words; metadata is copied, and codes where the bits stay."""
    out.meta.copy_(rows.meta)
    if old.bits == new.bits:
        out.codes.copy_(rows.codes[:, : new.codes_nbytes])
    elif not new.is_subordinate:
        narrow(head_codes(rows, old), old.bits, new.bits, old.name, old.shape.num_tokens, head_codes(out, new))


def dequantize(rows: SideBytes, side: UniformSide, dtype: torch.dtype) -> Tensor:
    """Elements [n, H, T, D]."""
    low, span = calibrated(read_meta(rows, side), side)
    # Attention wants channels to be contiguous, and bytes are cheaper to transpose than floats.
    out = read_codes(rows, side).contiguous().float()
    out *= spread(span / side.max_code, side)
    out += spread(low, side)
    return out.to(dtype)


def scores(q: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """logits_t = sum_d (q_d step_d) code_td + sum_d q_d min_d, with step and min of the token's group."""
    if side.axis == "token":
        return _sum_groups(q, rows, side)
    low, span = calibrated(meta_tile(rows, side), side).unsqueeze(4)
    inputs, factors = q.unsqueeze(2), token_factors(side.bits, side.shape.num_tokens)
    products = _multiply(inputs * span, rows, side)
    out = torch.addcmul((inputs * low).sum(-1, True), products, factors.view(-1, 1, side.group))
    return out.transpose(2, 3).reshape(*q.shape[:3], -1)


def values(p: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """out_d = sum_t (p_t step_t) code_td + sum_t p_t min_t, with step and min of the channel's group."""
    if side.axis == "channel":
        return _sum_groups(p, rows, side)
    low, span = _even_groups(calibrated(read_meta(rows, side), side), side).unsqueeze(4)
    inputs, factors = p.unsqueeze(2), token_factors(side.bits, side.shape.num_tokens)
    products = _multiply_planes(inputs * span.mul_(factors), rows, side)
    return products.add_((inputs * low).sum(-1, True)).transpose(2, 3).reshape(*p.shape[:3], -1)


UNIFORM_CPU = CpuOps(seal, demote, dequantize, scores, values)


def _groups(x: Tensor, side: UniformSide) -> list[Tensor]:
    """``x`` [n, H, T, D] as [n, H, groups, group, D] or [n, H, T, groups, group]; a smaller last group comes alone."""
    if side.axis == "channel":
        return [x.unflatten(2, (side.num_groups, side.group))]
    head_dim = side.shape.head_dim
    rest = head_dim % side.group
    parts = x.split([head_dim - rest, rest], 3) if rest else (x,)
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


def _store_codes(codes: Tensor, out: SideBytes, side: UniformSide) -> None:
    """Shapes:  codes [n, H, T, D] uint8, of 3 bits or else 8"""
    tile, packed = codes if side.name == "k" else codes.mT, head_codes(out, side)
    if side.bits == 8:
        packed.unflatten(-1, tile.shape[-2:]).copy_(tile)
    elif side.bits == 3:
        packed.copy_(pack(codes, 3, side.name))
    else:
        narrow(tile.flatten(-2), 8, side.bits, side.name, side.shape.num_tokens, packed)


def _store_meta(meta: Tensor, out: SideBytes, side: UniformSide) -> None:
    """Shapes:  meta [2, n, H, num_groups, D] or [2, n, H, T, num_groups] fp16"""
    tile = meta_tile(out, side)
    if side.axis == "token":
        meta = meta.mT.unflatten(-1, tile.shape[-2:])
    tile.copy_(meta)
    tops(out, side).copy_(meta[1].flatten(2).amax(-1))


def _sum_groups(x: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """K per token and V per channel: out_j = sum_g step_gj (x_g . code_gj) + min_gj sum x_g, [n, H, G, J].

    x_g is x with all inputs but those of group g zero; the products of all groups are taken at once.
    """
    low, span = calibrated(read_meta(rows, side), side)
    member, factors = _members(x.shape[-1], side.group), token_factors(side.bits, side.shape.num_tokens)
    bias = x @ member.mT @ low
    inputs = x.unsqueeze(2) * member.unsqueeze(1)
    if side.name == "k":
        span *= factors
        products = _multiply(inputs.flatten(2, 3).unsqueeze(2), rows, side)
    else:
        products = _multiply_planes((inputs * factors).flatten(2, 3).unsqueeze(2), rows, side)
    return (products.view(*inputs.shape[:-1], -1) * span.unsqueeze(3)).sum(2).add_(bias)


def _multiply_planes(x: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """Inputs x [n, H, S, M, T] times the codes of V, each head's in S runs of channels: [n, H, S, M, D / S]."""
    num_planes = 1 if side.bits % 2 else 8 // side.bits
    n, heads, parts, num_inputs, _ = x.shape
    planes = x.view(n, heads, parts, num_inputs, num_planes, -1).permute(0, 1, 4, 2, 3, 5)
    products = _multiply(planes.reshape(n, heads, num_planes * parts, num_inputs, -1), rows, side)
    return products.view(n, heads, num_planes, parts, num_inputs, -1).sum(2)


def _multiply(x: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """x [n, H, S, M, I] times the codes of each head as S matrices [R, I] in float32: [n, H, S, M, R].

    Codes are those of ``code_planes``. A few pages are converted at a time, which stay in a core's cache until they are
    multiplied.
    """
    n, heads, parts, num_inputs, size = x.shape
    inputs, packed, shape = x.reshape(-1, num_inputs, size), head_codes(rows, side), side.shape
    step = max(1, PIECE_ELEMENTS * torch.get_num_threads() // (heads * shape.num_tokens * shape.head_dim))
    if n <= step:
        out = _multiply_piece(inputs, packed, side)
    else:
        pieces = zip(inputs.split(step * heads * parts), packed.split(step), strict=True)
        out = torch.cat([_multiply_piece(*piece, side) for piece in pieces])
    return out.view(n, heads, parts, num_inputs, -1)


def _multiply_piece(x: Tensor, packed: Tensor, side: UniformSide) -> Tensor:
    codes = code_planes(packed, side.bits, side.name, side.shape.num_tokens).float()
    return torch.bmm(x, codes.view(x.shape[0], -1, x.shape[2]).mT)


def _even_groups(meta: Tensor, side: UniformSide) -> Tensor:
    """(min, range) [2, n, H, num_groups, T] of equal groups of channels, smaller ones if ``group`` divides no head."""
    size = gcd(side.group, side.shape.head_dim)
    if size == side.group:
        return meta
    return meta.repeat_interleave(side.group // size, 3)[:, :, :, : side.shape.head_dim // size]


@lru_cache
def _members(size: int, group: int) -> Tensor:
    """1 where an input is in a group, else 0: [groups, I] float32."""
    groups = torch.arange(-(-size // group))
    return (torch.arange(size) // group == groups[:, None]).float()
