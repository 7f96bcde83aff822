"""q/k norm, rotation, product with the basis of keys and KV write in Triton: one program a head and tile of tokens."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from .key_basis import KeyBasis

TILE_TOKENS = 16  # the fewest of a dot: most programs at once, and chunks gain 1 us a layer at most by larger tiles


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def rope_basis_kv_write_kernel(
    qkv_ptr, cos_ptr, signed_sin_ptr, rows_ptr, pages_ptr, weight_ptr, q_basis_ptr, k_basis_ptr, num_tokens, layer,
    stride_n,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotates BLOCK_K pairs of channels at a time and adds their part of the product: i goes with i + D / 2.

    Shapes:  as in the kernel without a basis;  q_basis, k_basis [H, D, D];  BLOCK_D >= D
    Grid:    (HQ + 2 H, cdiv(N, TILE_N))
    """
    let_next_start(OVERLAP)
    HALF: tl.constexpr = D // 2
    i_h = tl.program_id(0)
    o_n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < num_tokens
    m_x = m_n[:, None] & (o_d < D)[None, :]
    row = tl.load(rows_ptr + o_n * 2, mask=m_n, other=-1)
    stride = tl.load(rows_ptr + o_n * 2 + 1, mask=m_n, other=0)
    # V's heads follow K's in a page as they do in ``qkv``.
    p_page = pages_ptr + (row + (2 * layer * H + i_h - HQ) * stride)[:, None] * D + o_d[None, :]
    m_page = (row >= 0)[:, None] & m_x
    p_token = qkv_ptr + (o_n * stride_n + i_h * D)[:, None]
    p_head = p_token + o_d[None, :]
    wait_for_previous(OVERLAP)

    if i_h >= HQ + H:
        b_v = tl.load(p_head, mask=m_page, other=0.0)
        tl.store(p_page, b_v.to(pages_ptr.dtype.element_ty), mask=m_page)
    else:
        DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
        b_scale = tl.full([TILE_N, 1], 1.0, tl.float32)
        if NORM:
            b_x = tl.load(p_head, mask=m_x, other=0.0).to(tl.float32)
            b_scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + EPS)[:, None]
        p_matrix = q_basis_ptr + i_h // (HQ // H) * (D * D) if i_h < HQ else k_basis_ptr + (i_h - HQ) * (D * D)
        b_sum = tl.zeros([TILE_N, BLOCK_D], tl.float32)
        for first in range(0, HALF, BLOCK_K):
            o_k = first + tl.arange(0, BLOCK_K)
            m_k = o_k < HALF
            m_pair = m_n[:, None] & m_k[None, :]
            p_angle = o_n[:, None] * D + o_k[None, :]
            b_cos = tl.load(cos_ptr + p_angle, mask=m_pair, other=0.0)
            b_sin = tl.load(signed_sin_ptr + HALF + p_angle, mask=m_pair, other=0.0)
            b_x1 = tl.load(p_token + o_k[None, :], mask=m_pair, other=0.0).to(tl.float32)
            b_x2 = tl.load(p_token + HALF + o_k[None, :], mask=m_pair, other=0.0).to(tl.float32)
            if NORM:
                p_weight = weight_ptr + i_h * D + o_k
                b_weight1 = tl.load(p_weight, mask=m_k, other=0.0)[None, :].to(tl.float32)
                b_weight2 = tl.load(p_weight + HALF, mask=m_k, other=0.0)[None, :].to(tl.float32)
                b_x1 = ((b_x1 * b_scale).to(DTYPE).to(tl.float32) * b_weight1).to(DTYPE).to(tl.float32)
                b_x2 = ((b_x2 * b_scale).to(DTYPE).to(tl.float32) * b_weight2).to(DTYPE).to(tl.float32)
            b_rotated1 = (b_x1 * b_cos - b_x2 * b_sin).to(DTYPE)
            b_rotated2 = (b_x2 * b_cos + b_x1 * b_sin).to(DTYPE)
            p_columns = p_matrix + o_d[None, :] * D + o_k[:, None]
            m_columns = (o_d < D)[None, :] & m_k[:, None]
            b_m1 = tl.load(p_columns, mask=m_columns, other=0.0)
            b_m2 = tl.load(p_columns + HALF, mask=m_columns, other=0.0)
            b_sum = tl.dot(b_rotated1, b_m1, b_sum, input_precision="ieee")
            b_sum = tl.dot(b_rotated2, b_m2, b_sum, input_precision="ieee")
        b_out = b_sum.to(DTYPE)
        if i_h < HQ:
            tl.store(p_head, b_out, mask=m_x)
        else:
            tl.store(p_page, b_out.to(pages_ptr.dtype.element_ty), mask=m_page)


def rope_basis_kv_write_triton(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    rows: Tensor,
    pages: Tensor,
    layer: int,
    num_kv_heads: int,
    norm_weight: Tensor | None,
    eps: float,
    key_basis: KeyBasis,
) -> Tensor:
    """See ``rope_kv_write``."""
    num_tokens, heads, head_dim = qkv.shape
    assert qkv.stride()[1:] == (head_dim, 1) and len(rows) == num_tokens
    assert pages.is_contiguous() and pages.shape[1] == head_dim
    assert all(x.is_contiguous() and x.shape == (num_kv_heads, head_dim, head_dim) for x in key_basis)
    num_heads = heads - 2 * num_kv_heads
    norm, itemsize = norm_weight is not None, qkv.dtype.itemsize
    constexprs, num_warps = rope_basis_kv_write_variant(
        num_heads, num_kv_heads, head_dim, eps, norm=norm, itemsize=itemsize
    )
    rope_basis_kv_write_kernel[(heads, triton.cdiv(num_tokens, constexprs["TILE_N"]))](
        qkv, cos, signed_sin, rows, pages, norm_weight, key_basis.q, key_basis.k, num_tokens, layer, qkv.stride(0),
        **constexprs, num_warps=num_warps, num_stages=2, **overlap_options(qkv.device), **FUSED,
    )  # fmt: skip
    return qkv[:, :num_heads]


def rope_basis_kv_write_variant(
    num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, norm: bool, itemsize: int
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for a model's heads and elements of ``itemsize`` bytes.

    Heads of at most 128 channels take all their pairs at once. Products of float32 are unrolled, so they are narrower.
    """
    block = max(16, triton.next_power_of_2(head_dim))
    constexprs = {"HQ": num_heads, "H": num_kv_heads, "D": head_dim, "NORM": norm, "EPS": eps}
    constexprs |= {"TILE_N": TILE_TOKENS, "BLOCK_D": block}
    if itemsize > 2 or block > 128:
        return constexprs | {"BLOCK_K": 16 if itemsize > 2 else 32}, 4
    return constexprs | {"BLOCK_K": max(16, block // 2)}, 8
