"""Demotion in Triton: one program a (block, side of a layer, KV head)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..formats import BlockLayout, Side
from ..formats.steps import step_table
from ..fusion import UNFUSED


@triton.jit
def demote_kernel(
    memory_ptr, src_ptr, dst_ptr, steps_ptr, NUM_STEPS, H,
    DEMOTE: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Writes one head of one side ``OLD`` as ``NEW``.

    Shapes:  memory [M] uint8;  src, dst [n] int64;  steps [NUM_STEPS, 4] int64, offsets of codes and metadata in the
             source and in the target
    Grid:    (n * NUM_STEPS * H,)
    """
    i_h = tl.program_id(0) % H
    p_step = steps_ptr + 4 * (tl.program_id(0) // H % NUM_STEPS)
    i_n = tl.program_id(0) // H // NUM_STEPS
    source, target = tl.load(src_ptr + i_n), tl.load(dst_ptr + i_n)
    p_codes = memory_ptr + tl.multiple_of(source + tl.load(p_step), 16)
    p_meta = memory_ptr + tl.multiple_of(source + tl.load(p_step + 1), 16)
    p_to_codes = memory_ptr + tl.multiple_of(target + tl.load(p_step + 2), 16)
    p_to_meta = memory_ptr + tl.multiple_of(target + tl.load(p_step + 3), 16)
    DEMOTE(p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD, NEW, H, T, D, TILE_D)


@triton.jit
def copy_share(
    p_codes, p_meta, p_to_codes, p_to_meta, i_h, OLD: tl.constexpr, NEW: tl.constexpr, H, T: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Copies a head's share of the words of codes (``OLD``) and metadata (``NEW``) of a side whose format stays."""
    _copy_words(p_codes, p_to_codes, i_h, OLD, H)
    _copy_words(p_meta, p_to_meta, i_h, NEW, H)


@triton.jit
def _copy_words(p_from, p_to, i_h, NUM_WORDS: tl.constexpr, H):
    TILE_N: tl.constexpr = 1024
    p_from, p_to = p_from.to(tl.pointer_type(tl.uint16)), p_to.to(tl.pointer_type(tl.uint16))
    for start in range(i_h * TILE_N, NUM_WORDS, H * TILE_N):
        o_word = start + tl.arange(0, TILE_N)
        m_word = o_word < NUM_WORDS
        tl.store(p_to + o_word, tl.load(p_from + o_word, mask=m_word, other=0), mask=m_word)


def demote_triton(memory: Tensor, src: Tensor, dst: Tensor, source: BlockLayout, target: BlockLayout) -> None:
    """See ``demote``."""
    for old, new in source.steps(target):
        if old.dense_dtype is not None or len(src) == 0:
            continue
        steps, shape = step_table(source, target, old, new, memory.device), old.shape
        demote_kernel[(len(src) * len(steps) * shape.num_kv_heads,)](
            memory, src, dst, steps, len(steps), shape.num_kv_heads, **demote_variant(old, new), num_warps=8,
            **UNFUSED,
        )  # fmt: skip


def demote_variant(old: Side, new: Side) -> dict[str, Any]:
    """Compile-time arguments of ``demote_kernel``."""
    shape = old.shape
    extent = {"T": shape.num_tokens, "D": shape.head_dim, "TILE_D": triton.next_power_of_2(shape.head_dim)}
    if old == new:
        return {"DEMOTE": copy_share, "OLD": old.codes_nbytes // 2, "NEW": old.meta_nbytes // 2, **extent}
    return {"DEMOTE": new.family.triton().demote_head, "OLD": old.spec, "NEW": new.spec, **extent}
