"""Sealing in Triton: one program a (block, side of a layer, KV head), the whole [T, D] tile in registers."""

from __future__ import annotations

from struct import pack
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..formats import BlockLayout, Side, family
from ..formats.dense.triton import TL_DTYPE
from ..formats.steps import bank_table, step_table
from ..fusion import UNFUSED

LIMIT = tl.constexpr(family.LIMIT)
LIMIT_BITS = tl.constexpr(int.from_bytes(pack("<f", family.LIMIT), "little"))  # of ``LIMIT`` in float32


@triton.jit
def seal_kernel(
    memory_ptr, src_ptr, dst_ptr, steps_ptr, finite_ptr, NUM_STEPS, H, banks_ptr, bank_steps_ptr, windows_ptr,
    SEAL: tl.constexpr, SIDE: tl.constexpr, DTYPE: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """Writes one head of one dense side as ``SIDE``.

    Shapes:  memory [M] uint8;  src, dst [n] int64;  steps [NUM_STEPS, 4] int64, offsets of codes and metadata in the
             source and in the target;  finite [n] int64, set to 0 for a block with a NaN or an infinity;
             banks [n] int64, bank_steps [NUM_STEPS] int64, offsets of the patterns in a bank: ``None`` without;
             windows [n] int64, windows after the prompt up to the block: ``None`` for none
    Grid:    (n * NUM_STEPS * H,)
    """
    i_h = tl.program_id(0) % H
    p_step = steps_ptr + 4 * (tl.program_id(0) // H % NUM_STEPS)
    i_n = tl.program_id(0) // H // NUM_STEPS
    source = tl.load(src_ptr + i_n) + tl.load(p_step)
    p_source = (memory_ptr + tl.multiple_of(source, 16)).to(tl.pointer_type(DTYPE)) + i_h * (T * D)
    target = tl.load(dst_ptr + i_n)
    p_codes = memory_ptr + tl.multiple_of(target + tl.load(p_step + 2), 16)
    p_meta = memory_ptr + tl.multiple_of(target + tl.load(p_step + 3), 16)
    p_bank, num_windows = memory_ptr, 0
    if windows_ptr is not None:
        num_windows = tl.load(windows_ptr + i_n).to(tl.int32)
    if banks_ptr is not None:
        bank = tl.load(banks_ptr + i_n) + tl.load(bank_steps_ptr + tl.program_id(0) // H % NUM_STEPS)
        p_bank = memory_ptr + tl.multiple_of(bank, 16)
    o_d = tl.arange(0, TILE_D)[None, :]
    b_raw = tl.load(p_source + tl.arange(0, T)[:, None] * D + o_d, mask=o_d < D, other=0.0)
    b_x = b_raw.to(tl.float32)
    # As integers, absolute values keep their order, with infinities and NaNs above all others.
    b_bits = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(tl.max(b_bits, 1), 0) > LIMIT_BITS:
        m_finite = tl.abs(b_x) < float("inf")
        if tl.min(tl.min(m_finite.to(tl.int32), 1), 0) == 0:
            tl.store(finite_ptr + i_n, 0)
        b_x = tl.where(m_finite, tl.minimum(tl.maximum(b_x, -LIMIT), LIMIT), 0.0)
    SEAL(p_codes, p_meta, p_bank, num_windows, b_raw, b_x, i_h, SIDE, H, T, D, TILE_D)


def seal_triton(
    memory: Tensor,
    src: Tensor,
    dst: Tensor,
    source: BlockLayout,
    target: BlockLayout,
    finite: Tensor,
    banks: Tensor | None = None,
    num_windows: Tensor | None = None,
) -> None:
    """See ``seal``."""
    for old, new in source.steps(target):
        if old.dense_dtype is None or len(src) == 0:
            continue
        steps, heads = step_table(source, target, old, new, memory.device), old.shape.num_kv_heads
        where = (banks, bank_table(source, target, old, new, memory.device)) if new.bank_nbytes else (None, None)
        windows = num_windows if new.num_later else None
        constexprs, num_warps = seal_variant(old, new)
        seal_kernel[(len(src) * len(steps) * heads,)](
            memory, src, dst, steps, finite, len(steps), heads, *where, windows,
            **constexprs, num_warps=num_warps, **UNFUSED,
        )  # fmt: skip


def seal_variant(old: Side, new: Side) -> tuple[dict[str, Any], int]:
    """Compile-time arguments of ``seal_kernel``, and warps: patterns are compared with elements held in registers."""
    assert old.dense_dtype is not None
    shape, tile_d = old.shape, max(16, triton.next_power_of_2(old.shape.head_dim))  # dots with patterns need 16
    extent = {"T": shape.num_tokens, "D": shape.head_dim, "TILE_D": tile_d}
    ops = new.family.triton()
    constexprs = {"SEAL": ops.seal_head, "SIDE": new.spec, "DTYPE": TL_DTYPE[old.dense_dtype], **extent}
    return constexprs, max(ops.seal_warps, tile_d // 32) * (2 if new.bank_nbytes else 1)
