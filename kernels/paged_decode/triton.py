"""Decode attention on the GPU: one launch for each format present, one merge."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..formats import PageLayout
from ..formats.family import KeyFunctions, ValueFunctions
from ..formats.loaders import page_loaders
from ..fusion import FUSED
from ..nvidia import has_large_shared
from ..overlap import overlap_options
from .float_kernel import decode_float_kernel
from .int_kernel import decode_int_kernel
from .layer import FormatRange, LayerFormats
from .merge import merge_kernel
from .plan import DecodeWork
from .split import Bounds

LOG2_E = math.log2(math.e)
NO_BANKS = {"banks_ptr": None, "k_bank": None, "v_bank": None}
NO_WINDOW = {"positions_ptr": None, "lengths_ptr": None}


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of one format's kernel; ``tile``: tokens of a tile of scores."""

    num_warps: int
    num_stages: int
    tile: int = 32


# A page's address is itself loaded first, so 5 stages hold two pages (3 or 4 only one).
FLOAT_TUNING = Tuning(num_warps=2, num_stages=5)
WIDE_TUNING = Tuning(num_warps=8, num_stages=3, tile=16)  # of more than 256 channels: nothing spills

SHORT_STAGES = 2  # for many short items: more programs on a multiprocessor gain more than deeper prefetch
FEW_ITEMS = 64  # of those, which find room with deeper prefetch: it saves 16 requests 1 us a layer
DEEP_TUNING = 2, 5  # warps and stages for two pages of codes under way
DEEP_NBYTES = 18 << 10  # of a head's codes in a page, K and V together: with two pages six programs find room

STEADY_MERGE = 8, 1, 1  # as ``_merge_tile`` gives, for any number of parts

FEW_PROGRAMS = 128  # fewer leave most multiprocessors free: kernels that divide L1 differently do not share one


def paged_decode(
    q: Tensor,
    arena: Tensor,
    work: DecodeWork,
    layer: LayerFormats,
    scale: float,
    out: Tensor | None = None,
    tuning: Tuning | None = None,
    softcap: float | None = None,
    null_logits: Tensor | None = None,
) -> Tensor:
    """Attention of one query per request over its blocks on all rungs, as far back as the plan's window.

    Shapes:  q [B, HQ, D], any strides of the outer dims;  arena [nbytes] uint8;  null_logits [HQ];
             returns [B, HQ, D] in q's dtype
    ``tuning``: launch parameters of the layer's narrowest format. Requests without a visible token give zeros.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = layer.ranges[0].page.k.shape.num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert arena.dtype == torch.uint8 and q.stride(2) == out.stride(2) == 1 and num_heads % num_kv_heads == 0
    num_parts = len(work.items)
    o = torch.empty(num_parts, num_heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_parts, num_heads, dtype=torch.float32, device=q.device)
    options = overlap_options(q.device)
    for index, (formats, num_programs) in enumerate(launches(layer.ranges, work.bounds, num_kv_heads)):
        kernel, constexprs, tuned = decode_variant(
            formats.page,
            num_heads // num_kv_heads,
            sink_tokens=work.sink_tokens,
            tuning=tuning if formats is layer.ranges[-1] else None,
            is_short=_has_many_short(work.bounds) and formats.end == 1,
            is_deep=work.bounds.is_deep and has_large_shared(q.device),
            window=work.window,
            softcap=softcap,
        )
        places = {} if "positions_ptr" in constexprs else {"positions_ptr": work.positions, "lengths_ptr": work.lengths}
        kernel[(num_programs,)](
            q,
            q.stride(0),
            q.stride(1),
            arena,
            layer.offsets,
            work.items,
            work.item_first,
            formats.first,
            formats.end,
            work.addresses,
            o_ptr=o,
            lse_ptr=lse,
            scale_log2=scale * LOG2_E,
            **places,
            **bank_arguments(formats.page, work.banks),
            **constexprs,
            IS_FIRST=index == 0,
            num_warps=tuned.num_warps,
            **options,
            **FUSED,
        )
    block_p, block_h, num_warps = STEADY_MERGE if work.bounds.is_steady else _merge_tile(num_parts, batch)
    merge_kernel[(batch, triton.cdiv(num_heads, block_h))](
        o,
        lse,
        work.part_first,
        out,
        out.stride(0),
        out.stride(1),
        null_logits,
        HQ=num_heads,
        D=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=block_p,
        num_warps=num_warps,
        **options,
        **FUSED,
    )
    return out


def kernel_names(bounds: Bounds, batch: int) -> list[Hashable]:
    """Names of the kernels that ``paged_decode`` launches for ``batch`` requests of one ladder.

    Launches of one name differ in their grids and tensors alone, so that they share a compiled kernel.
    """
    order = (bounds.others > 0) + (bounds.others > bounds.first)  # the first is another kernel than the rest
    merge = STEADY_MERGE if bounds.is_steady else _merge_tile(bounds.num_items, batch)
    return [("attention", _has_many_short(bounds), bounds.is_deep, order), ("merge", *merge)]


def bank_arguments(page: PageLayout, banks: Tensor | None) -> dict[str, Any]:
    """Kernel arguments for a page's patterns: ``banks`` of the requests or chunks, and the offsets of its sides."""
    if not page.has_bank:
        return NO_BANKS
    assert banks is not None, "pages with patterns are read with their requests' banks"
    return {"banks_ptr": banks, "k_bank": page.k_bank, "v_bank": page.v_bank}


def _has_many_short(bounds: Bounds) -> bool:
    """Whether so many items of the first rung are short that they need room more than prefetch."""
    return bounds.is_short and bounds.first > FEW_ITEMS


def _merge_tile(num_parts: int, batch: int) -> tuple[int, int, int]:
    """Parts joined at a time by the merge, its heads of a program, and its warps, by the parts that a request has."""
    parts = -(-num_parts // batch)
    if parts <= 4:
        return 4, 4, 1  # programs of one head are too many
    return STEADY_MERGE if parts <= 16 else (32, 1, 4)  # twice eight by one warp beat 16 by two, of 128 channels


def launches(ranges: Sequence[FormatRange], bounds: Bounds, num_kv_heads: int) -> list[tuple[FormatRange, int]]:
    """Formats present and the programs of their launches: few programs beside large launches, then by falling size.

    The first rung has its own bound of items. All other rungs share one, so the launch shape stays while blocks step
    down among them. A program beyond its format's last item reads two numbers, cached in L1, and ends.
    """
    sizes = [(formats, formats.max_items(bounds) * num_kv_heads) for formats in ranges]
    return sorted(((f, n) for f, n in sizes if n), key=lambda launch: (launch[1] >= FEW_PROGRAMS, -launch[1]))


@cache  # a layer has few formats, and a step that no graph replays asks for each of them
def decode_variant(
    page: PageLayout,
    group: int,
    *,
    sink_tokens: int,
    tuning: Tuning | None = None,
    is_short: bool = False,
    is_deep: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Any, dict[str, Any], Tuning]:
    """Kernel, compile-time arguments and launch parameters for pages of one format.

    ``group``: query heads a KV head;  ``is_deep``: codes have room for more pages under way.
    """
    num_tokens, head_dim = page.k.shape.num_tokens, page.k.shape.head_dim
    shape = {"H": page.k.shape.num_kv_heads, "G": group, "D": head_dim, "T": num_tokens}
    scores = {"WINDOW": window, "SOFTCAP": softcap}
    k, v = (side.family.triton().integer(side) for side in (page.k, page.v))
    if isinstance(k, KeyFunctions) and isinstance(v, ValueFunctions):
        block_g = max(4, triton.next_power_of_2(group))  # two int8 columns a head fill the 8 of an mma
        is_early = is_deep and tuning is None and _fits_twice(page)
        tuning = tuning or integer_tuning(page, block_g, max(k.min_tiles, v.min_tiles))
        if is_early:
            tuning = replace(tuning, num_warps=DEEP_TUNING[0], num_stages=DEEP_TUNING[1])
        functions = {"QUERY": k.query, "SCORES": k.scores, "BEGIN": v.begin, "ADD": v.add, "FINISH": v.finish}
        sides = {"K": page.k.spec, "V": page.v.spec, "TILES": num_tokens // tuning.tile}
        constexprs = {**shape, **scores, **functions, **sides, "BLOCK_G": block_g, "STAGES": tuning.num_stages}
        constexprs |= {"EARLY": is_early}
        return decode_int_kernel, constexprs if window is not None else {**constexprs, **NO_WINDOW}, tuning
    block_d = max(16, triton.next_power_of_2(head_dim))
    if tuning is None:
        is_16_bit = page.k.dense_dtype is not None and page.k.dense_dtype.itemsize == 2
        tuning = FLOAT_TUNING if is_16_bit or block_d < 128 else replace(FLOAT_TUNING, num_warps=4)
        if block_d > 256:
            tuning = WIDE_TUNING
        if is_short:
            tuning = replace(tuning, num_stages=SHORT_STAGES)
    return (
        decode_float_kernel,
        {
            **shape,
            **scores,
            **page_loaders(page),
            "S": sink_tokens,
            "BLOCK_D": block_d,
            "BLOCK_G": max(16, triton.next_power_of_2(group)),
            "TILE": tuning.tile,
            "STAGES": tuning.num_stages,
        },
        tuning,
    )


def _fits_twice(page: PageLayout) -> bool:
    """Whether a program of the integer body may have two pages under way in place of one; narrower ones have two."""
    shape = page.k.shape
    sizes = [side.codes_nbytes // shape.num_kv_heads for side in (page.k, page.v)]
    return 8 * max(sizes) > 3 * shape.num_tokens * shape.head_dim and sum(sizes) <= DEEP_NBYTES and not page.has_bank


def integer_tuning(page: PageLayout, block_g: int, min_tiles: int) -> Tuning:
    """Launch parameters of the integer body by the code bits of K and V.

    One page ahead is enough where eight programs a multiprocessor keep the memory busy, which they do not at 3 bits and
    less. Wide score tiles need fewer instructions and more registers, twice as many with eight heads.
    """
    shape = page.k.shape
    elements = shape.num_kv_heads * shape.num_tokens * shape.head_dim
    bits = [8 * side.codes_nbytes // elements for side in (page.k, page.v)]
    num_warps, num_stages = (2, 2) if min(bits) > 4 else (1, 4) if max(bits) > 3 else (1, 5)
    tiles = min_tiles if block_g <= 4 or min(bits) > 4 else 4
    if shape.head_dim > 256:
        return Tuning(WIDE_TUNING.num_warps, 1 if min(bits) > 4 else 2, shape.num_tokens // tiles)
    return Tuning(num_warps * max(1, block_g // 8), num_stages, shape.num_tokens // tiles)
