"""The plan of decode attention made on the device from its block tables, in two launches of fixed shape.

The result is that of ``DecodeWork.build`` but for undefined values: behind a request's last block and the last item.

Shapes:  input as ``pack_input`` makes it;  words as in ``BlockWords``;  rows [B] int64 and lengths [B] int32 of the
         requests;  counts [B, BLOCK_R] int32, blocks by rung;  addresses, positions, items, item_first, part_first,
         banks as in ``DecodeWork``
Grid:    (B,) both: a request's blocks sorted by rung, then its items on each rung behind those of the requests before
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..block_tables import ITEM_BLOCKS, RUNG_BITS, BlockWords
from ..fusion import FUSED
from .plan import DecodeWork
from .split import Bounds


@triton.jit(do_not_specialize=["num_numbers", "width"])
def sort_blocks_kernel(
    words_ptr,
    rows_ptr,
    lengths_ptr,
    addresses_ptr,
    positions_ptr,
    counts_ptr,
    num_numbers,
    width,
    banks_ptr,
    RUNG_BITS: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + i_b)
    p_row = words_ptr + num_numbers + tl.load(rows_ptr + i_b) * width
    if banks_ptr is not None:
        bank = tl.load(words_ptr + tl.load(p_row + width - 1))
        tl.store(banks_ptr + i_b, bank >> RUNG_BITS)
    num_blocks = (tl.maximum(length - S, 0) + T - 1) // T
    if S > 0:
        num_blocks += (length > 0).to(tl.int32)
    first = 0
    if WINDOW is not None:
        start = length - WINDOW
        first = tl.maximum(start - S, 0) // T
        if S > 0:
            first += (start >= S).to(tl.int32)
    o_r = tl.arange(0, BLOCK_R)
    b_counts = tl.zeros([BLOCK_R], tl.int32)
    for i in range(first, num_blocks, BLOCK):
        o_p = i + tl.arange(0, BLOCK)
        number = tl.load(p_row + o_p, mask=o_p < num_blocks, other=0)
        rung = tl.load(words_ptr + number, mask=o_p < num_blocks, other=0) & ((1 << RUNG_BITS) - 1)
        b_mine = (o_r[:, None] == rung[None, :]) & (o_p < num_blocks)[None, :]
        b_counts += tl.sum(b_mine.to(tl.int32), 1)
    tl.store(counts_ptr + i_b * BLOCK_R + o_r, b_counts)
    b_next = tl.cumsum(b_counts, 0) - b_counts
    for i in range(first, num_blocks, BLOCK):
        o_p = i + tl.arange(0, BLOCK)
        b_p = o_p < num_blocks
        number = tl.load(p_row + o_p, mask=b_p, other=0)
        word = tl.load(words_ptr + number, mask=b_p, other=0)
        rung = word & ((1 << RUNG_BITS) - 1)
        b_mine = ((o_r[:, None] == rung[None, :]) & b_p[None, :]).to(tl.int32)
        b_place = b_next[:, None] + tl.cumsum(b_mine, 1) - 1
        o_sorted = i_b * width + tl.sum(b_mine * b_place, 0)
        position = o_p * T
        if S > 0:
            position = tl.maximum(S + (o_p - 1) * T, 0)
            position = tl.where(o_p == 0, 0, position)
        tl.store(addresses_ptr + o_sorted, word >> RUNG_BITS, mask=b_p)
        tl.store(positions_ptr + o_sorted, position.to(tl.int32), mask=b_p)
        b_next += tl.sum(b_mine, 1)


@triton.jit(do_not_specialize=["batch", "width", "most_blocks"])
def split_items_kernel(
    input_ptr,
    counts_ptr,
    items_ptr,
    item_first_ptr,
    part_first_ptr,
    batch,
    width,
    most_blocks,
    ITEM_BLOCKS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0)
    item_blocks = most_blocks
    if most_blocks is None:
        item_blocks = tl.load(input_ptr + ITEM_BLOCKS).to(tl.int32)
    o_r, o_i = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    b_before = tl.zeros([BLOCK_R], tl.int32)  # items by rung of the requests before this one
    b_total = tl.zeros([BLOCK_R], tl.int32)
    for i in range(0, batch, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B)
        p_counts = counts_ptr + o_b[:, None] * BLOCK_R + o_r[None, :]
        b_items = (tl.load(p_counts, mask=(o_b < batch)[:, None], other=0) + item_blocks - 1) // item_blocks
        b_before += tl.sum(tl.where((o_b < i_b)[:, None], b_items, 0), 0)
        b_total += tl.sum(b_items, 0)
    b_end = tl.cumsum(b_total, 0)
    b_first = b_end - b_total + b_before
    b_mine = tl.load(counts_ptr + i_b * BLOCK_R + o_r)
    block, part = i_b * width, tl.sum(b_before, 0)
    tl.store(part_first_ptr + i_b, part)
    if i_b == 0:
        tl.store(item_first_ptr, 0)
        tl.store(item_first_ptr + 1 + o_r, b_end, mask=o_r < R)
        tl.store(part_first_ptr + batch, tl.sum(b_total, 0))
    for r in range(R):
        count = tl.sum(tl.where(o_r == r, b_mine, 0), 0)
        p_run = items_ptr + tl.sum(tl.where(o_r == r, b_first, 0), 0) * 5
        num_items = (count + item_blocks - 1) // item_blocks
        for i in range(0, num_items, BLOCK):
            o = i + o_i
            b_o = o < num_items
            p_item = p_run + o * 5
            skipped = o * count // num_items
            tl.store(p_item, tl.zeros([BLOCK], tl.int32) + i_b, mask=b_o)
            tl.store(p_item + 1, block + skipped, mask=b_o)
            tl.store(p_item + 2, (o + 1) * count // num_items - skipped, mask=b_o)
            tl.store(p_item + 3, part + o, mask=b_o)
            tl.store(p_item + 4, tl.zeros([BLOCK], tl.int32) + r, mask=b_o)
        block += count
        part += num_items


def plan_decode(
    tables: BlockWords,
    step_input: Tensor,
    rows: Tensor,
    lengths: Tensor,
    num_rungs: int,
    bounds: Bounds,
    window: int | None = None,
    item_blocks: int | None = None,
) -> DecodeWork:
    """Plan of one decode for each of ``rows`` [B] of the tables, over its first ``lengths`` [B] tokens.

    ``step_input`` says how many blocks an item has at most, unless ``item_blocks`` does. ``bounds`` must hold for
    blocks on ``num_rungs`` rungs: items are not counted on the host. Entries before a ``window`` are not read.
    """
    batch, block_r, device = len(rows), triton.next_power_of_2(num_rungs), rows.device

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    addresses, positions = make(batch * tables.width, dtype=torch.int64), make(batch * tables.width)
    counts, items = make(batch, block_r), make(bounds.num_items, 5)
    item_first, part_first = make(num_rungs + 1), make(batch + 1)
    banks = make(batch, dtype=torch.int64) if tables.has_bank else None
    sort_blocks_kernel[(batch,)](
        tables.words,
        rows,
        lengths,
        addresses,
        positions,
        counts,
        tables.num_numbers,
        tables.width,
        banks,
        RUNG_BITS=RUNG_BITS,
        S=tables.sink_tokens,
        T=tables.block_tokens,
        WINDOW=window,
        BLOCK_R=block_r,
        BLOCK=64,
        num_warps=2,
        **FUSED,
    )
    split_items_kernel[(batch,)](
        step_input,
        counts,
        items,
        item_first,
        part_first,
        batch,
        tables.width,
        item_blocks,
        ITEM_BLOCKS=ITEM_BLOCKS,
        R=num_rungs,
        BLOCK_R=block_r,
        BLOCK_B=128,
        BLOCK=32,
        num_warps=4,
        **FUSED,
    )
    sink_tokens, block_tokens = tables.sink_tokens, tables.block_tokens
    return DecodeWork(
        addresses, positions, lengths, items, item_first, part_first, bounds, sink_tokens, block_tokens, banks, window
    )
