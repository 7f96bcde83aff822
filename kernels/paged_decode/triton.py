"""Decode attention on the GPU: one launch a rung present, one merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..tiles import PageFormat
from ..tiles.launch import page_constexprs
from .float_kernel import decode_float_kernel
from .merge import merge_kernel
from .plan import DecodeWork

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of one kernel body."""

    num_warps: int
    num_stages: int
    tile: int = 32
    maxnreg: int | None = None


FLOAT_TUNING = Tuning(num_warps=2, num_stages=3)


def paged_decode(
    q: Tensor,
    arena: Tensor,
    work: DecodeWork,
    pages: Sequence[PageFormat | None],
    num_kv_heads: int,
    scale: float,
    out: Tensor | None = None,
    tuning: Sequence[Tuning | None] | None = None,
) -> Tensor:
    """Attention of one query per request over its blocks on all rungs.

    Shapes:  q [B, HQ, D], rows contiguous;  arena [nbytes] uint8;  returns [B, HQ, D] in q's dtype
    ``pages[r]`` says how this layer's pages on rung r are read.
    """
    batch, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert q.stride(2) == out.stride(2) == 1 and arena.dtype == torch.uint8 and num_heads % num_kv_heads == 0
    o = torch.empty(work.num_parts, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(work.num_parts, num_heads, dtype=torch.float32, device=q.device)
    for rung, num_items in enumerate(work.num_items):
        page = pages[rung]
        if num_items and page is not None:
            chosen = tuning[rung] if tuning else None
            _launch(q, arena, work, rung, page, num_kv_heads, scale, o, lse, chosen)
    block_d = triton.next_power_of_2(head_dim)
    merge_kernel[(batch, num_heads)](
        o,
        lse,
        work.part_first,
        out,
        out.stride(0),
        out.stride(1),
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_P=8,
        num_warps=1,
    )
    return out


def _launch(
    q: Tensor,
    arena: Tensor,
    work: DecodeWork,
    rung: int,
    page: PageFormat,
    num_kv_heads: int,
    scale: float,
    o: Tensor,
    lse: Tensor,
    tuning: Tuning | None,
) -> None:
    """One rung's launch: all its work items, every KV head."""
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    tuning = tuning or FLOAT_TUNING
    decode_float_kernel[(work.num_items[rung], num_kv_heads)](
        q,
        q.stride(0),
        q.stride(1),
        arena,
        page.k_offset,
        page.v_offset,
        work.items[rung],
        work.addresses,
        work.positions,
        work.lengths,
        o,
        lse,
        scale * LOG2_E,
        **float_constexprs(page, num_kv_heads, group, head_dim, work, tuning),
        num_warps=tuning.num_warps,
    )


def float_constexprs(
    page: PageFormat, num_kv_heads: int, group: int, head_dim: int, work: DecodeWork, tuning: Tuning
) -> dict[str, object]:
    """Compile-time arguments of the floating-point body."""
    return {
        **page_constexprs(page),
        "H": num_kv_heads,
        "G": group,
        "D": head_dim,
        "T": work.block_tokens,
        "S": work.sink_tokens,
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
    }
