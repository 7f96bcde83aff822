"""Attention in parts on the CPU: each part of a request's KV gives an output and a log-sum-exp, which merge exactly.

With S the scores of all keys and S_p those of part p: out = sum_p softmax_p(lse_p) out_p, lse_p = log sum exp S_p.
Source: flash-decoding split-KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention of ``q`` over ``k``, ``v`` and the log-sum-exp of its scores, in any strides of the outer dims.

    Shapes:  q [B, H, M, D];  k, v [B, H, T, D];  mask [B|1, H|1, M|1, T], 0 or -inf;  out [B, H, M, D], lse [B, H, M]
    ``is_causal`` aligns query i with key i. lse is float32, in natural log. Rows without a visible key are undefined.
    """
    if mask is not None:
        mask = mask.to(q.dtype).expand(-1, -1, q.shape[2], -1)
    return _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def merge_parts(out: Tensor, lse: Tensor) -> Tensor:
    """Joins parts along dim 0; a part of lse -inf has no weight, if its output is finite.

    Shapes:  out [P, ..., D];  lse [P, ...] float32;  returns [..., D], float32 from 16 bits
    """
    return (out * lse.softmax(0).unsqueeze(-1)).sum(0)
