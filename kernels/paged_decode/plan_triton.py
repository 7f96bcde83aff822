"""The plan of decode attention made on the device from its block tables, in two launches of fixed shape.

The result is that of ``DecodeWork.build`` with ``max_items``, but for what lies behind a request's last block and in
items of 0 blocks.

Shapes:  words as in ``BlockWords``;  rows [B] int64 and lengths [B] int32 of the requests;  counts [B, BLOCK_R] int32,
         blocks by rung;  addresses, positions, items, part_first as in ``DecodeWork``
Grid:    (B,) both: a request's blocks sorted by rung, then its items behind those of the requests before it
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..block_tables import RUNG_BITS, BlockWords
from .split import ItemBlocks, num_last
from .plan import DecodeWork


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
    RUNG_BITS: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + i_b)
    p_row = words_ptr + num_numbers + tl.load(rows_ptr + i_b) * width
    num_blocks = (tl.maximum(length - S, 0) + T - 1) // T
    if S > 0:
        num_blocks += (length > 0).to(tl.int32)
    o_r = tl.arange(0, BLOCK_R)
    b_counts = tl.zeros([BLOCK_R], tl.int32)
    for i in range(0, num_blocks, BLOCK):
        o_p = i + tl.arange(0, BLOCK)
        number = tl.load(p_row + o_p, mask=o_p < num_blocks, other=0)
        rung = tl.load(words_ptr + number, mask=o_p < num_blocks, other=0) & ((1 << RUNG_BITS) - 1)
        b_mine = (o_r[:, None] == rung[None, :]) & (o_p < num_blocks)[None, :]
        b_counts += tl.sum(b_mine.to(tl.int32), 1)
    tl.store(counts_ptr + i_b * BLOCK_R + o_r, b_counts)
    b_next = tl.cumsum(b_counts, 0) - b_counts
    for i in range(0, num_blocks, BLOCK):
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


@triton.jit(
    do_not_specialize=["batch", "width", "most_items", "stride_items", "item_blocks", "last_blocks", "num_first"]
)
def cut_items_kernel(
    counts_ptr,
    items_ptr,
    part_first_ptr,
    batch,
    width,
    most_items,
    stride_items,
    item_blocks,
    last_blocks,
    num_first,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = tl.program_id(0)
    o_r, o_i = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)
    b_before = tl.zeros([BLOCK_R], tl.int32)  # items by rung of the requests before this one
    b_total = tl.zeros([BLOCK_R], tl.int32)
    for i in range(0, batch, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B)
        p_counts = counts_ptr + o_b[:, None] * BLOCK_R + o_r[None, :]
        b_size = tl.where(o_b < num_first, item_blocks, last_blocks)[:, None]
        b_items = (tl.load(p_counts, mask=(o_b < batch)[:, None], other=0) + b_size - 1) // b_size
        b_before += tl.sum(tl.where((o_b < i_b)[:, None], b_items, 0), 0)
        b_total += tl.sum(b_items, 0)
    b_mine = tl.load(counts_ptr + i_b * BLOCK_R + o_r)
    block, part = i_b * width, tl.sum(b_before, 0)
    size = tl.where(i_b < num_first, item_blocks, last_blocks)
    tl.store(part_first_ptr + i_b, part)
    if i_b == batch - 1:
        tl.store(part_first_ptr + batch, tl.sum(b_total, 0))
    for r in tl.static_range(R):
        count = tl.sum(tl.where(o_r == r, b_mine, 0), 0)
        first = tl.sum(tl.where(o_r == r, b_before, 0), 0)
        total = tl.sum(tl.where(o_r == r, b_total, 0), 0)
        num_items = (count + size - 1) // size
        p_items = items_ptr + r * stride_items
        for i in range(0, num_items, BLOCK):
            o = i + o_i
            b_o = (o < num_items) & (first + o < most_items)
            p_item = p_items + (first + o) * 4
            tl.store(p_item, tl.zeros([BLOCK], tl.int32) + i_b, mask=b_o)
            skipped = o * count // num_items
            tl.store(p_item + 1, block + skipped, mask=b_o)
            tl.store(p_item + 2, (o + 1) * count // num_items - skipped, mask=b_o)
            tl.store(p_item + 3, part + o, mask=b_o)
        for i in range(total + i_b * BLOCK, most_items, batch * BLOCK):  # a share of the unused ones
            tl.store(p_items + (i + o_i) * 4 + 2, tl.zeros([BLOCK], tl.int32), mask=i + o_i < most_items)
        block += count
        part += num_items


def plan_decode(
    tables: BlockWords,
    rows: Tensor,
    lengths: Tensor,
    *,
    item_blocks: ItemBlocks,
    max_items: Sequence[int],
    short: tuple[bool, ...] = (),
) -> DecodeWork:
    """Plan of one decode for each of ``rows`` [B] of the tables, over its first ``lengths`` [B] tokens.

    Items have up to ``item_blocks`` blocks; ``max_items[r]`` bounds the items of rung r: the grid of its launch.
    """
    batch, num_rungs, most = len(rows), len(max_items), max(max_items)
    block_r, device = triton.next_power_of_2(num_rungs), rows.device

    def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    addresses, positions = make(batch * tables.width, dtype=torch.int64), make(batch * tables.width)
    counts, items, part_first = make(batch, block_r), make(num_rungs, most, 4), make(batch + 1)
    sort_blocks_kernel[(batch,)](
        tables.words,
        rows,
        lengths,
        addresses,
        positions,
        counts,
        tables.num_numbers,
        tables.width,
        RUNG_BITS=RUNG_BITS,
        S=tables.sink_tokens,
        T=tables.block_tokens,
        BLOCK_R=block_r,
        BLOCK=64,
        num_warps=2,
    )
    cut_items_kernel[(batch,)](
        counts,
        items,
        part_first,
        batch,
        tables.width,
        most,
        most * 4,
        item_blocks.first,
        item_blocks.last,
        batch - num_last(batch),
        R=num_rungs,
        BLOCK_R=block_r,
        BLOCK_B=128,
        BLOCK=32,
        num_warps=4,
    )
    return DecodeWork(
        addresses,
        positions,
        lengths,
        items,
        part_first,
        tuple(max_items),
        sum(max_items),
        tables.sink_tokens,
        tables.block_tokens,
        short,
    )
