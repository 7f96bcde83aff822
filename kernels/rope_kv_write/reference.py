"""Plain torch: the definition, used where tensors are not on a GPU; the engine's CPU attention has its own form."""

from __future__ import annotations

import torch
from torch import Tensor

from .key_basis import KeyBasis, in_basis


def rope_kv_write_reference(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    rows: Tensor,
    pages: Tensor,
    layer: int,
    num_kv_heads: int,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    key_basis: KeyBasis | None = None,
) -> Tensor:
    """Same contract as ``qkv_engine.kernels.rope_kv_write.rope_kv_write``."""
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    if norm_weight is not None:
        wide = qk.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        qk = norm_weight * wide.to(qkv.dtype)
    first, second = qk.float().chunk(2, dim=-1)
    qk = (qk * cos + torch.cat((second, first), -1) * signed_sin).to(qkv.dtype)
    if key_basis is not None:
        q, k = qk.float().split((num_heads, num_kv_heads), dim=1)
        qk = torch.cat((in_basis(q, key_basis.q.float()), in_basis(k, key_basis.k.float())), 1).to(qkv.dtype)
    qkv[:, :num_heads] = qk[:, :num_heads]
    written = rows[:, 0] >= 0
    row, stride = rows[written, :1], rows[written, 1:]
    # V's heads follow K's in a page as they do in ``qkv``.
    heads = 2 * layer * num_kv_heads + torch.arange(2 * num_kv_heads, device=qkv.device)
    kv = torch.cat((qk[:, num_heads:], v), 1)[written]
    pages[row + heads * stride] = kv.to(pages.dtype)
    return qkv[:, :num_heads]
