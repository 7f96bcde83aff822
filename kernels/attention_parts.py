"""Attention in parts on the CPU: each part of a request's KV gives an output and a log-sum-exp, which merge exactly.

With S the scores of all keys and S_p those of part p: out = sum_p softmax_p(lse_p) out_p, lse_p = log sum exp S_p.
Source: flash-decoding split-KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

CAPPED_SCORES = 2**24  # computed at a time where a soft cap keeps attention from being one call

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``q`` over ``k``, ``v`` and the log-sum-exp of its scores, in any strides of the outer dims.

    Shapes:  q [B, H, M, D];  k, v [B, H, T, D];  mask [B|1, H|1, M|1, T], 0 or -inf;  out [B, H, M, D], lse [B, H, M]
    ``is_causal`` aligns query i with key i. ``softcap`` c makes s of a score c tanh(s / c). lse is float32, in natural
    log. Rows without a visible key are undefined.
    """
    if mask is not None:
        mask = mask.to(q.dtype).expand(-1, -1, q.shape[2], -1)
    if softcap is not None:
        return _capped_attention(q, k, v, scale, mask, is_causal, softcap)
    return _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def merge_parts(out: Tensor, lse: Tensor) -> Tensor:
    """Joins parts along dim 0; a part of lse -inf has no weight, if its output is finite.

    Shapes:  out [P, ..., D];  lse [P, ...] float32;  returns [..., D], float32 from 16 bits
    """
    return (out * lse.softmax(0).unsqueeze(-1)).sum(0)


def merge_steadily(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """``merge_parts`` with the same bits whatever lies beside and however many parts lack, and the weights' sum.

    The log-sum-exp of all is the sum's logarithm and the largest of ``lse``. Torch's softmax and sum over the first
    dimension treat whole vectors of elements otherwise than a remainder.
    """
    weights = (lse - lse.amax(0)).exp_()
    out, total = _tree_sum(out * weights.unsqueeze(-1)), _tree_sum(weights)
    return out.div_(total.unsqueeze(-1)), total


def _tree_sum(x: Tensor) -> Tensor:
    """The sum over the first dimension of ``x``, which it overwrites: of neighbours, then of neighbouring sums."""
    while len(x) > 2:
        sums, others = x[::2], x[1::2]
        sums[: len(others)].add_(others)
        x = sums
    first, *rest = x.unbind()
    return first.add_(rest[0]) if rest else first


def join_null_logits(out: Tensor, lse: Tensor, null_logits: Tensor) -> Tensor:
    """The output of a softmax that also has ``null_logits``, without a value, from ``out`` and its log-sum-exp.

    Shapes:  out [..., D];  lse [...];  null_logits in a shape that expands to lse's
    """
    return out * torch.sigmoid(lse - null_logits.to(lse.dtype)).unsqueeze(-1)


def soft_capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores s as c tanh(s / c)."""
    return (scores / softcap).tanh_().mul_(softcap)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """``partial_attention`` of scores with a soft cap, in float32, some queries at a time."""
    batch, heads, num_queries, _ = q.shape
    k, v = k.float(), v.float()
    step = max(1, CAPPED_SCORES // (batch * heads * k.shape[2]))
    parts = []
    for i in range(0, num_queries, step):
        scores = soft_capped(scale * q[:, :, i : i + step].float() @ k.mT, softcap)
        if mask is not None:
            scores = scores + mask[:, :, i : i + step]
        if is_causal:
            rows = torch.arange(i, i + scores.shape[2])[:, None]
            scores = scores.masked_fill(torch.arange(k.shape[2]) > rows, float("-inf"))
        parts.append((scores.softmax(-1) @ v, scores.logsumexp(-1)))
    out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return out.to(q.dtype), lse
