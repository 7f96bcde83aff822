"""A plain encoder of uniform sides, byte by byte as ``kernels/formats/uniform/layout.py`` describes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv_engine.kernels.formats.uniform.layout import UniformSide


class Encoded(NamedTuple):
    """Bytes of one page side. ``written`` [meta_nbytes] marks metadata in use, not padding; values [H, T, D]."""

    codes: Tensor
    meta: Tensor
    written: Tensor
    values: Tensor


def encode(side: UniformSide, x: Tensor) -> Encoded:
    """``x`` [H, T, D] float32 as bytes, with the float64 values of the bytes."""
    axis = 1 if side.axis == "channel" else 2
    groups = torch.arange(x.shape[axis], device=x.device) // side.group
    parts = [x[:, groups == g] if axis == 1 else x[:, :, groups == g] for g in range(side.num_groups)]
    low = torch.stack([p.amin(axis) for p in parts], axis).half()
    span = (torch.stack([p.amax(axis) for p in parts], axis) - low.float()).half()
    all_low, all_span = low.index_select(axis, groups).double(), span.index_select(axis, groups).double()
    codes = ((x - all_low) / all_span.clamp(min=1e-8) * side.max_code).round().clamp(0, side.max_code).long()
    heads = [_pack(side, head) for head in codes]
    meta, written = _metadata(side, low, span)
    shares = float(side.eta) + float(1 - 2 * side.eta) * codes / side.max_code
    return Encoded(torch.cat(heads), meta, written, all_low + shares * all_span)


def _pack(side: UniformSide, codes: Tensor) -> Tensor:
    """Bytes of one head's codes [T, D]."""
    if side.bits == 3:
        return torch.cat((_pack_set(side, codes & 3, 2), _pack_set(side, codes >> 2, 1)))
    return _pack_set(side, codes, side.bits)


def _pack_set(side: UniformSide, codes: Tensor, width: int) -> Tensor:
    num_tokens, head_dim = codes.shape
    t = torch.arange(num_tokens, device=codes.device)[:, None].expand_as(codes)
    d = torch.arange(head_dim, device=codes.device).expand_as(codes)
    if width == 1:
        lanes, columns = num_tokens // 4, head_dim // 2
        lane, column, shift = t % lanes, d % columns, d // columns * 4 + t // lanes
    else:
        lanes, columns = num_tokens * width // 8, head_dim
        lane, column, shift = t % lanes, d, t // lanes * width
    at = lane * columns + column if side.name == "k" else column * lanes + lane
    out = torch.zeros(lanes * columns, dtype=torch.int64, device=codes.device)
    return out.index_add(0, at.flatten(), (codes << shift).flatten()).to(torch.uint8)


def _metadata(side: UniformSide, low: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """Metadata bytes of a side with the largest ranges behind them, and the mask of the bytes in use."""
    if side.axis == "channel":
        pairs = torch.stack((low, span), 1)  # [H, 2, groups, D]
    else:
        pairs = torch.stack((low, span), -1).transpose(1, 2)  # [H, groups, T, 2]
        pairs = pairs.unflatten(2, (4, -1)).transpose(2, 3)  # [H, groups, lanes, tiles, 2]
    heads = pairs.flatten(1).contiguous().view(torch.uint8)
    meta = torch.zeros(side.meta_nbytes, dtype=torch.uint8, device=low.device)
    written = torch.zeros_like(meta, dtype=torch.bool)
    for h, head in enumerate(heads):
        at = h * side.head_meta_nbytes
        meta[at : at + len(head)], written[at : at + len(head)] = head, True
    meta[side.top_offset :] = span.flatten(1).amax(1).view(torch.uint8)
    written[side.top_offset :] = True
    return meta, written
