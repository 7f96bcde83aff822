"""Uniform sides in vectorised torch: sealing, demotion, and attention on the bare codes.

With x = min + code * step, min and step act on queries, scores, probabilities or outputs, which are small, and never on
the elements of a page. Codes are only converted to float32 for the product.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..family import CpuOps, SideBytes
from .codes import code_planes, narrow, pack, token_factors
from .layout import UniformSide
from .reference import LIMIT, head_codes, meta_tile, read_codes, read_meta, round_down, round_up, spread, tops


def seal(dense: Tensor, out: SideBytes, side: UniformSide) -> bool:
    """Codes and metadata of ``dense`` [n, H, T, D]; whether all values are finite. See ``reference.quantize``."""
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
    _store_codes(x.to(torch.int16).to(torch.uint8), out, side)
    _store_meta(torch.cat(metas, -1) if len(metas) > 1 else metas[0], out, side)
    return finite


def demote(rows: SideBytes, out: SideBytes, old: UniformSide, new: UniformSide) -> None:
    """Packed words to packed words; the metadata is copied."""
    narrow(head_codes(rows, old), old.bits, new.bits, old.name, old.shape.num_tokens, head_codes(out, new))
    out.meta.copy_(rows.meta)


def dequantize(rows: SideBytes, side: UniformSide, dtype: torch.dtype) -> Tensor:
    """Elements [n, H, T, D]."""
    low, span = read_meta(rows, side).float()
    # Attention wants channels to be contiguous, and bytes are cheaper to transpose than floats.
    out = read_codes(rows, side).contiguous().float()
    out *= spread(span / side.max_code, side)
    out += spread(low, side)
    return out.to(dtype)


def scores(q: Tensor, rows: SideBytes, side: UniformSide) -> tuple[Tensor, Tensor | None]:
    """logits_t = sum_d (q_d step_d) code_td + sum_d q_d min_d, or its counterparts for groups and per-token K.

    With one group of tokens a channel, min adds the same to all scores of a page, which the softmax ignores.
    """
    if side.axis != "channel" or side.num_groups > 1:
        return _product(q, rows, side), None
    low, span = meta_tile(rows, side).float()
    codes = _planes(rows, side)
    n, heads, queries, size = q.shape
    out = torch.bmm((q * span).view(n * heads, queries, size), codes.view(n * heads, -1, size).mT)
    out = out.view(n, heads, queries, -1).mul_(token_factors(side.bits, side.shape.num_tokens))
    return out, (q * low).sum(-1)


def values(p: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """out_d = sum_t (p_t step_t) code_td + sum_t p_t min_t, or its counterparts for groups and per-channel V."""
    if side.axis != "token" or side.num_groups > 1:
        return _product(p, rows, side)
    low, span = meta_tile(rows, side).flatten(-2).float()
    codes = _planes(rows, side)
    n, heads, queries, _ = p.shape
    planes = n * heads * codes.shape[2]
    inputs = p * span.mul_(token_factors(side.bits, side.shape.num_tokens))
    inputs = inputs.view(n * heads, queries, codes.shape[2], -1).transpose(1, 2).reshape(planes, queries, -1)
    out = torch.bmm(inputs, codes.view(planes, side.shape.head_dim, -1).mT)
    return out.view(n, heads, -1, queries, side.shape.head_dim).sum(2).add_((p * low).sum(-1, True))


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


def _product(x: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """Queries times K, or probabilities times V: x [n, H, G, I] . side [n, H, J, I] -> [n, H, G, J].

    (min, range) either vary along I, for groups of J, and scale the inputs; or along J, for groups of I, and scale
    the outputs. The inputs of all groups [n, H, groups, G, I] are multiplied at once.
    """
    is_k = side.name == "k"
    low, span = read_meta(rows, side).float().unbind()
    factors = token_factors(side.bits, side.shape.num_tokens)
    inputs = (x if is_k else x * factors).unsqueeze(2)
    if (side.axis == "channel") == is_k:
        bias = x @ low.mT
        if side.num_groups > 1:
            extent = side.shape.num_tokens if is_k else side.shape.head_dim
            bias = bias.repeat_interleave(side.group, -1)[..., :extent]
        out = _diagonal(_dot(inputs * span.unsqueeze(3), rows, side), side.group)
    else:
        member = _members(x.shape[-1], side.group)
        bias = x @ member.mT @ low
        out = (_dot(inputs * member.unsqueeze(1), rows, side) * span.unsqueeze(3)).sum(2)
    return torch.addcmul(bias, out, factors) if is_k else out.add_(bias)


def _planes(rows: SideBytes, side: UniformSide) -> Tensor:
    """``code_planes`` of each head in float32: K [n, H, planes, lanes, D] or V [n, H, planes, D, lanes]."""
    return code_planes(head_codes(rows, side), side.bits, side.name, side.shape.num_tokens).float()


def _dot(x: Tensor, rows: SideBytes, side: UniformSide) -> Tensor:
    """x [n, H, groups, G, I] . masked codes [n, H, J, I] -> [n, H, groups, G, J]"""
    n, heads, groups, queries, size = x.shape
    codes = _planes(rows, side)
    num_planes, inputs = codes.shape[2], x.reshape(n * heads, groups * queries, size)
    if side.name == "k" or num_planes == 1:
        out = torch.bmm(inputs, codes.view(n * heads, -1, size).mT)
    else:
        # A product a plane: joining the planes of V would cost more than adding up their outputs.
        inputs = inputs.view(n * heads, groups * queries, num_planes, -1).transpose(1, 2)
        out = torch.matmul(inputs, codes.flatten(0, 1).mT).sum(1)
    return out.view(n, heads, groups, queries, -1)


def _diagonal(products: Tensor, group: int) -> Tensor:
    """Of products [n, H, groups, G, J] those of each group's inputs with its own outputs, [n, H, G, J]."""
    if products.shape[2] == 1:
        return products.squeeze(2)
    return torch.cat([run[:, :, g] for g, run in enumerate(products.split(group, -1))], -1)


@lru_cache
def _members(size: int, group: int) -> Tensor:
    """1 where an input is in a group, else 0: [groups, I] float32."""
    groups = torch.arange(-(-size // group))
    return (torch.arange(size) // group == groups[:, None]).float()
