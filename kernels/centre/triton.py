"""Centres in Triton: one program a (block, side of a layer, KV head)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..formats import Banks, BlockLayout
from ..formats.dense.triton import TL_DTYPE
from ..formats.steps import bank_table, step_table


@triton.jit
def centre_kernel(
    memory_ptr, src_ptr, steps_ptr, banks_ptr, centres_ptr, bank_steps_ptr, NUM_STEPS, H, most,
    DTYPE: tl.constexpr, T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Writes the centre of one head of one dense side, if the block adds one and it is below ``most``.

    Shapes:  memory [M] uint8;  src [n] int64;  steps [NUM_STEPS, 4] int64, of which the first is the offset of the
             elements;  banks, centres [n] int64 as in ``Banks``;  bank_steps [NUM_STEPS] int64, offsets in a bank
    Grid:    (n * NUM_STEPS * H,)
    """
    i_h, i_step = tl.program_id(0) % H, tl.program_id(0) // H % NUM_STEPS
    i_n = tl.program_id(0) // H // NUM_STEPS
    centre = tl.load(centres_ptr + i_n)
    if (centre >= 0) & (centre < most):
        source = tl.load(src_ptr + i_n) + tl.load(steps_ptr + 4 * i_step)
        p_x = (memory_ptr + tl.multiple_of(source, 16)).to(tl.pointer_type(DTYPE)) + i_h * (T * D)
        o_d = tl.arange(0, TILE_D)
        b_x = tl.load(p_x + tl.arange(0, T)[:, None] * D + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
        b_x = b_x.to(tl.float32)
        b_x = tl.where(tl.abs(b_x) < float("inf"), tl.minimum(tl.maximum(b_x, -32752.0), 32752.0), 0.0)
        b_centre = ((tl.min(b_x, 0) + tl.max(b_x, 0)) * 0.5 + 0.0).to(tl.float16)
        bank = tl.load(banks_ptr + i_n) + tl.load(bank_steps_ptr + i_step)
        p_out = (memory_ptr + tl.multiple_of(bank, 16)).to(tl.pointer_type(tl.float16)) + (centre * H + i_h) * D
        tl.store(p_out + o_d, b_centre, mask=o_d < D)


def centre_triton(memory: Tensor, src: Tensor, source: BlockLayout, target: BlockLayout, banks: Banks) -> None:
    """See ``write_centres``."""
    for old, new in source.steps(target):
        if old.dense_dtype is None or not new.bank_nbytes or len(src) == 0:
            continue
        steps = step_table(source, target, old, new, memory.device)
        bank_steps = bank_table(source, target, old, new, memory.device)
        shape, tile_d = old.shape, triton.next_power_of_2(old.shape.head_dim)
        centre_kernel[(len(src) * len(steps) * shape.num_kv_heads,)](
            memory, src, steps, banks.address, banks.centre, bank_steps, len(steps), shape.num_kv_heads,
            new.num_patterns,
            DTYPE=TL_DTYPE[old.dense_dtype], T=shape.num_tokens, D=shape.head_dim, TILE_D=tile_d,
            num_warps=max(4, tile_d // 32),
        )  # fmt: skip
