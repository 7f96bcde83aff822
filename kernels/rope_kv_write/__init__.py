"""The work between the qkv projection and attention in one launch: q/k norm, rotation, K and V into their pages."""

from __future__ import annotations

from torch import Tensor

from .key_basis import KeyBasis
from .reference import rope_kv_write_reference


def rope_kv_write(
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
    """Normalises q and k head by head if there is a ``norm_weight``, rotates them, and stores k and v in dense pages.

    With a ``key_basis`` rotated heads of q and k are multiplied by its matrices.
    Rounds as the separate operators do: to the model's dtype after the norm, after its weight, after the rotation and
    after the product.
    On a GPU all but ``qkv`` are read while the kernel before may still run: that kernel must not write them.

    A dense slot is ``[layers][K, V][H][tokens]`` rows of D elements. So two numbers place a token in all layers: the
    row of its K in head 0 of layer 0, -1 for padding, and the rows from one head to the next. Side s (0: K, 1: V) of
    layer l and head h is at ``row + ((2 l + s) H + h) * rows between heads``.

    Shapes:  qkv [N, HQ + 2 H, D], each token's contiguous, its q part overwritten;
             cos, signed_sin [N, 1, D] float32, from ``RotaryEmbedding``: halves of cos equal, of sin opposite;
             rows [N, 2] int64, as above;
             pages [R, D], the whole arena as rows in the pages' dtype;  norm_weight [HQ + H, D];
             key_basis [H, D, D], contiguous, in the dtype of ``qkv``
    Returns: q [N, HQ, D], a view of ``qkv``
    """
    arguments = (qkv, cos, signed_sin, rows, pages, layer, num_kv_heads, norm_weight, eps)
    if not qkv.is_cuda:
        return rope_kv_write_reference(*arguments, key_basis)
    if key_basis is None:
        from .triton import rope_kv_write_triton

        return rope_kv_write_triton(*arguments)
    from .basis_triton import rope_basis_kv_write_triton

    return rope_basis_kv_write_triton(*arguments, key_basis)


__all__ = ["KeyBasis", "rope_kv_write", "rope_kv_write_reference"]
