"""Prefill attention on the GPU: one launch a rung present, each continuing the softmax of the one before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from ..paged_decode.triton import Tuning
from ..tiles import DenseSide, PageFormat
from ..tiles.launch import page_constexprs
from .kernel import prefill_kernel
from .plan import PrefillWork

LOG2_E = math.log2(math.e)
BLOCK_M = 128  # rows of a query tile: tokens times the query heads that share a KV head
DENSE_TUNING = Tuning(num_warps=8, num_stages=5, tile=64)
CODES_TUNING = Tuning(num_warps=8, num_stages=3, tile=64)


def tile_tokens(num_heads: int, num_kv_heads: int, block_m: int = BLOCK_M) -> int:
    """Tokens of a query tile, which ``PrefillWork.build`` asks for."""
    return block_m // (num_heads // num_kv_heads)


def paged_prefill(
    q: Tensor,
    arena: Tensor,
    work: PrefillWork,
    pages: Sequence[PageFormat | None],
    num_kv_heads: int,
    scale: float,
    out: Tensor | None = None,
    tunings: Sequence[Tuning | None] = (),
) -> Tensor:
    """Attention of chunks, written to their blocks, over themselves and their requests' earlier tokens.

    Shapes:  q [N, HQ, D], any strides of the outer dims;  arena [nbytes] uint8;  returns [N, HQ, D] in q's dtype
    ``pages[r]`` says how this layer's pages on rung r are read.
    """
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert arena.dtype == torch.uint8 and q.stride(2) == out.stride(2) == 1 and num_heads % num_kv_heads == 0
    state = (0,) if len(work.rungs) == 1 else (num_rows, num_heads)
    lse = torch.empty(state, dtype=torch.float32, device=q.device)
    o = torch.empty((*state, head_dim), dtype=torch.float32, device=q.device)
    for rung in work.rungs:
        page = pages[rung]
        assert page is not None
        constexprs, tuning = prefill_variant(
            page,
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            work.block_tokens,
            work.sink_tokens,
            tunings[rung] if tunings else None,
        )
        prefill_kernel[(len(work.tiles), num_kv_heads)](
            q,
            q.stride(0),
            q.stride(1),
            arena,
            page.k_offset,
            page.v_offset,
            work.tiles,
            work.runs[rung],
            work.addresses,
            work.positions,
            o,
            lse,
            out,
            out.stride(0),
            out.stride(1),
            scale * LOG2_E,
            IS_FIRST=rung == work.rungs[0],
            IS_LAST=rung == work.rungs[-1],
            **constexprs,
            num_warps=tuning.num_warps,
        )
    return out


def prefill_variant(
    page: PageFormat,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    sink_tokens: int,
    tuning: Tuning | None = None,
) -> tuple[dict[str, Any], Tuning]:
    """Compile-time arguments (but for the launch's place in the order) and launch parameters."""
    is_dense = isinstance(page.k, DenseSide) and isinstance(page.v, DenseSide)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tuning = tuning or (DENSE_TUNING if is_dense else CODES_TUNING)
    if block_d > 128:  # two stages of 64 tokens would not fit in shared memory
        tuning = replace(tuning, tile=32)
    constexprs = {
        **page_constexprs(page),
        "H": num_kv_heads,
        "G": group,
        "D": head_dim,
        "T": block_tokens,
        "S": sink_tokens,
        "BLOCK_M": BLOCK_M,
        "BLOCK_D": block_d,
        "TILE": tuning.tile,
        "STAGES": tuning.num_stages,
    }
    return constexprs, tuning
