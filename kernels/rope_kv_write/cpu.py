"""q/k norm, rotation and KV write in few torch operators, for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .key_basis import KeyBasis, in_basis


def rope_kv_write(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    rows: Tensor,
    pages: Tensor,
    num_kv_heads: int,
    norm: Callable[[Tensor], Tensor] | None,
    key_basis: KeyBasis | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises and rotates q and k in place, puts them in ``key_basis`` if there is one, and stores k and v.

    Shapes:  qkv [N, HQ + 2 H, D];  cos, signed_sin [N, 1, D] float32;  rows [N, 2 H] int64, the row of ``pages`` of
             each token's K heads, then V heads, from ``head_rows``;  pages [R, D];  ``norm`` maps [N, HQ + H, D]
    Returns: q [N, HQ, D] and kv [N, 2 H, D], views of ``qkv``
    """
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, kv = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads:]
    rotate(qk if norm is None else norm(qk), cos, signed_sin, out=qk)
    if key_basis is not None:
        q, k = qk.tensor_split((num_heads,), 1)
        q.copy_(in_basis(q, key_basis.q))
        k.copy_(in_basis(k, key_basis.k))
    pages.index_put_((rows,), kv.to(pages.dtype))
    return qkv[:, :num_heads], kv


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor, out: Tensor) -> None:
    """Rotates channel ``i`` with channel ``i + D/2`` (Hugging Face's convention), in float32; ``out`` may be ``x``.

    Shapes: x and out [N, heads, D]; cos, signed_sin [N, 1, D] float32, the first half of the sines negated, which
            turns ``cat(-x2, x1) * sin`` into a roll.
    """
    rolled = x.roll(x.shape[-1] // 2, -1)
    if out.dtype is torch.float32 and not x.requires_grad:
        torch.mul(x, cos, out=out).addcmul_(rolled, signed_sin)
    else:
        out.copy_((x * cos).addcmul_(rolled, signed_sin))


def head_rows(rows: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
    """Rows of all heads of a step's tokens in each layer, [L, N, 2 H], from ``rows`` [N, 2]."""
    return rows[:, :1] + _sides(num_layers, num_kv_heads) * rows[:, 1:]


@cache
def _sides(num_layers: int, num_kv_heads: int) -> Tensor:
    """Numbers of K's and V's heads in a dense slot, layer by layer: [L, 1, 2 H]."""
    return torch.arange(num_layers * 2 * num_kv_heads).view(num_layers, 1, 2 * num_kv_heads)
