"""Attention over sealed blocks in vectorised torch, on the bare codes.

With K = min + code * step and V likewise, min and step act on queries, scores, probabilities or outputs, which are
small, and never on the elements of a page; the codes themselves are only converted to float32 for the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..bits import planes
from ..layout import BlockLayout, UniformSide
from ..pages import gather, read_meta

PIECE_ELEMENTS = 2**19  # codes converted at a time, so that they are still in cache when they are multiplied


def block_attention(
    q: Tensor, memory: Tensor, addresses: Tensor, layout: BlockLayout, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of query i over all tokens of the block at address i, and the log-sum-exp of its scores.

    Shapes:  q [n, H, G, D];  memory [M] uint8;  addresses [n] int64, byte addresses of slots;
             out [n, H, G, D] float32, lse [n, H, G] float32, in natural log
    Source:  logits_t = sum_d (q_d step_d) code_td + sum_d q_d min_d, and its counterparts for V and per-token K
    """
    k, v = layout.sides[2 * layer], layout.sides[2 * layer + 1]
    assert isinstance(k, UniformSide) and isinstance(v, UniformSide)
    page = gather(memory, addresses + layout.offsets[2 * layer], k.nbytes + v.nbytes)
    scores = _scores(q.float() * scale, page[:, : k.nbytes], k)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _values(weights, page[:, k.nbytes :], v) / total
    return out, (top + total.log()).squeeze(-1)


def _scores(q: Tensor, rows: Tensor, side: UniformSide) -> Tensor:
    """q [n, H, G, D] . K -> [n, H, G, T]"""
    low, span = read_meta(rows, side).float().unsqueeze(4)
    step = span / side.max_code
    parts, first = [], 0
    for codes, mask in _planes(rows, side):
        factor = 1 / (mask & -mask)
        if side.axis == "channel":
            for run in codes.split(side.group, 2):
                g = first // side.group
                bias = (q * low[:, :, g]).sum(-1, keepdim=True)
                parts.append(torch.add(bias, _dot(q * (step[:, :, g] * factor), run, mask)))
                first += run.shape[2]
        else:
            tokens = slice(first, first + codes.shape[2])
            first = tokens.stop
            groups = zip(q.split(side.group, 3), codes.split(side.group, 3), strict=True)
            parts.append(
                sum(
                    _dot(part_q, part, mask) * (step[:, :, g, :, tokens] * factor)
                    + part_q.sum(-1, keepdim=True) * low[:, :, g, :, tokens]
                    for g, (part_q, part) in enumerate(groups)
                )
            )
    return torch.cat(parts, -1)


def _values(p: Tensor, rows: Tensor, side: UniformSide) -> Tensor:
    """p [n, H, G, T] . V -> [n, H, G, D]"""
    low, span = read_meta(rows, side).float().unsqueeze(4)
    step = span / side.max_code
    out = p.new_zeros(*p.shape[:3], side.head_dim)
    first = 0
    for codes, mask in _planes(rows, side):
        factor = 1 / (mask & -mask)
        if side.axis == "channel":
            for run in codes.split(side.group, 3):
                g = first // side.group
                part_p = p[..., first : first + run.shape[3]]
                out += _dot(part_p * factor, run, mask) * step[:, :, g]
                out += part_p.sum(-1, keepdim=True) * low[:, :, g]
                first += run.shape[3]
        else:
            tokens = slice(first, first + codes.shape[3])
            first = tokens.stop
            groups = zip(out.split(side.group, 3), codes.split(side.group, 2), strict=True)
            for g, (part_out, part) in enumerate(groups):
                part_p = p[..., tokens]
                part_out += _dot(part_p * (step[:, :, g, :, tokens] * factor), part, mask)
                part_out += (part_p * low[:, :, g, :, tokens]).sum(-1, keepdim=True)
    return out


def _planes(rows: Tensor, side: UniformSide) -> Iterator[tuple[Tensor, int]]:
    packed = rows[:, : side.meta_offset].unflatten(1, (side.num_kv_heads, -1))
    return planes(packed, side.bits, side.side, side.num_tokens)


def _dot(x: Tensor, codes: Tensor, mask: int) -> Tensor:
    """x [n, H, G, I] . (codes & mask) [n, H, J, I] uint8 -> [n, H, G, J]"""
    piece = max(1, PIECE_ELEMENTS // codes[0].numel())
    scratch = torch.empty(min(piece, len(codes)), *codes.shape[1:])
    parts = []
    for part, tile in zip(x.split(piece), codes.split(piece), strict=True):
        held = scratch[: len(tile)].copy_(tile if mask == 255 else tile & mask)
        parts.append(part @ held.mT)
    return torch.cat(parts)
