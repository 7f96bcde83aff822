"""q/k norm, rotation and KV write in Triton: one program a token and tile of its heads, q, k and v alike."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous

TILE_H = 8


@triton.jit(do_not_specialize=["layer"])
def rope_kv_write_kernel(
    qkv_ptr, cos_ptr, signed_sin_ptr, rows_ptr, pages_ptr, weight_ptr, layer, stride_n,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    TILE_H: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Reads heads in two halves, which rotate into each other: channel i with channel i + D / 2.

    Shapes:  qkv [N, HQ + 2 H, D], tokens ``stride_n`` apart;  cos, signed_sin [N, D] float32;  rows [N, 2] int64;
             pages [R, D];  weight [HQ + H, D];  BLOCK_D >= D / 2
    Grid:    (N * cdiv(HQ + 2 H, TILE_H),)
    """
    let_next_start(OVERLAP)
    HEADS: tl.constexpr = HQ + 2 * H
    TILES: tl.constexpr = (HEADS + TILE_H - 1) // TILE_H
    HALF: tl.constexpr = D // 2
    i_n = (tl.program_id(0) // TILES).to(tl.int64)
    o_h = tl.program_id(0) % TILES * TILE_H + tl.arange(0, TILE_H)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HALF
    m_rotated = (o_h < HQ + H)[:, None]
    m_x = (o_h < HEADS)[:, None] & m_d[None, :]
    o_angle = i_n * D + tl.broadcast_to(o_d[None, :], [TILE_H, BLOCK_D])  # a row would reach heads by shared memory
    b_cos = tl.load(cos_ptr + o_angle, mask=m_d[None, :], other=0.0)
    b_sin = tl.load(signed_sin_ptr + HALF + o_angle, mask=m_d[None, :], other=0.0)
    row = tl.load(rows_ptr + i_n * 2)
    stride = tl.load(rows_ptr + i_n * 2 + 1)
    if NORM:
        p_weight = weight_ptr + o_h[:, None] * D + o_d[None, :]
        b_weight1 = tl.load(p_weight, mask=m_rotated & m_d[None, :], other=0.0)
        b_weight2 = tl.load(p_weight + HALF, mask=m_rotated & m_d[None, :], other=0.0)
    wait_for_previous(OVERLAP)

    p_x = qkv_ptr + i_n * stride_n + o_h[:, None] * D + o_d[None, :]
    b_raw1 = tl.load(p_x, mask=m_x, other=0.0)
    b_raw2 = tl.load(p_x + HALF, mask=m_x, other=0.0)
    b_x1, b_x2 = b_raw1.to(tl.float32), b_raw2.to(tl.float32)
    DTYPE: tl.constexpr = b_raw1.dtype
    if NORM:
        b_scale = tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, 1) / D + EPS)[:, None]
        b_x1 = ((b_x1 * b_scale).to(DTYPE).to(tl.float32) * b_weight1.to(tl.float32)).to(DTYPE).to(tl.float32)
        b_x2 = ((b_x2 * b_scale).to(DTYPE).to(tl.float32) * b_weight2.to(tl.float32)).to(DTYPE).to(tl.float32)
    b_out1 = tl.where(m_rotated, b_x1 * b_cos - b_x2 * b_sin, b_raw1.to(tl.float32)).to(DTYPE)
    b_out2 = tl.where(m_rotated, b_x2 * b_cos + b_x1 * b_sin, b_raw2.to(tl.float32)).to(DTYPE)

    m_q = (o_h < HQ)[:, None] & m_d[None, :]
    tl.store(p_x, b_out1, mask=m_q)
    tl.store(p_x + HALF, b_out2, mask=m_q)
    # V's heads follow K's in a page as they do in ``qkv``.
    last = tl.where(row < 0, HQ, HEADS)
    m_kv = ((o_h >= HQ) & (o_h < last))[:, None] & m_d[None, :]
    p_page = pages_ptr + (row + (2 * layer * H + o_h - HQ) * stride)[:, None] * D + o_d[None, :]
    tl.store(p_page, b_out1.to(pages_ptr.dtype.element_ty), mask=m_kv)
    tl.store(p_page + HALF, b_out2.to(pages_ptr.dtype.element_ty), mask=m_kv)


def rope_kv_write_triton(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    rows: Tensor,
    pages: Tensor,
    layer: int,
    num_kv_heads: int,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """See ``rope_kv_write``."""
    num_tokens, heads, head_dim = qkv.shape
    assert qkv.stride()[1:] == (head_dim, 1) and len(rows) == num_tokens
    assert pages.is_contiguous() and pages.shape[1] == head_dim
    num_heads = heads - 2 * num_kv_heads
    norm = norm_weight is not None
    constexprs, num_warps = rope_kv_write_variant(num_heads, num_kv_heads, head_dim, eps, norm=norm)
    rope_kv_write_kernel[(num_tokens * triton.cdiv(heads, TILE_H),)](
        qkv, cos, signed_sin, rows, pages, norm_weight, layer, qkv.stride(0),
        **constexprs, num_warps=num_warps, **overlap_options(qkv.device), **FUSED,
    )  # fmt: skip
    return qkv[:, :num_heads]


def rope_kv_write_variant(
    num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, norm: bool
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments and warps for a model's heads."""
    block = triton.next_power_of_2(head_dim // 2)
    constexprs = {"HQ": num_heads, "H": num_kv_heads, "D": head_dim, "NORM": norm, "EPS": eps}
    constexprs |= {"TILE_H": TILE_H, "BLOCK_D": block}
    return constexprs, min(8, max(1, TILE_H * block // 256))  # 8 elements of each half a thread: loads of 16 bytes
