"""The basis of a layer's keys, and products of heads with matrices."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeyBasis(NamedTuple):
    """Matrices [H, D, D], one a KV head, by which keys and queries are multiplied after their rotation.

    The queries' is the inverse of the keys', transposed, so scores stay the same up to rounding.
    """

    k: Tensor
    q: Tensor


def in_basis(x: Tensor, matrices: Tensor) -> Tensor:
    """Each head of ``x`` times the matrix of its KV head. Shapes:  x and result [N, heads, D];  matrices [H, D, D]"""
    num_tokens, heads, head_dim = x.shape
    num_kv_heads = len(matrices)
    by_head = x.view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    product = by_head @ matrices.mT
    return product.view(num_kv_heads, num_tokens, -1, head_dim).transpose(0, 1).reshape(num_tokens, heads, head_dim)
