"""Block tables on the device in launches of fixed shape, as a captured graph needs them.

Shapes:  step_input [HEADER + 3 N + 2 U] int64 as ``pack_input`` makes it;  words as in ``BlockWords``;
         last_tokens [rows] int64;  outputs as in ``Placed``
Grid:    update: (MAX_UPDATES / BLOCK,);  place: (ceil(N / BLOCK),);  entry_words: (ceil(number * B / BLOCK),)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkv_engine.table_words import RUNG_BITS

from ..fusion import FUSED
from .words import HEADER, MAX_UPDATES, BlockWords, Placed

BLOCK = 128  # updates, or tokens, of one program


@triton.jit(do_not_specialize=["first"])
def update_kernel(input_ptr, words_ptr, first, BLOCK: tl.constexpr):
    o_u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_u = o_u < tl.load(input_ptr)
    p_pair = input_ptr + first + 2 * o_u
    index = tl.load(p_pair, mask=b_u, other=0)
    tl.store(words_ptr + index, tl.load(p_pair + 1, mask=b_u, other=0), mask=b_u)


@triton.jit(do_not_specialize=["num_tokens", "num_numbers", "width"])
def place_kernel(
    input_ptr,
    words_ptr,
    last_tokens_ptr,
    ids_ptr,
    positions_ptr,
    lengths_ptr,
    token_rows_ptr,
    num_tokens,
    num_numbers,
    width,
    row_nbytes,
    HEADER: tl.constexpr,
    RUNG_BITS: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_t = o_t < num_tokens
    p_in = input_ptr + HEADER + o_t
    token_id = tl.load(p_in, mask=b_t, other=0)
    position = tl.load(p_in + num_tokens, mask=b_t, other=-1)
    row = tl.load(p_in + 2 * num_tokens, mask=b_t, other=0)
    last = tl.load(last_tokens_ptr + row, mask=b_t & (token_id < 0), other=0)
    b_known = position >= 0
    position = tl.where(b_known, position + tl.load(input_ptr + 1), position)
    index = tl.maximum(position - S, 0) // T
    offset = tl.maximum(position - S, 0) % T
    page_tokens = tl.full([BLOCK], T, tl.int64)
    if S > 0:
        index = tl.where(position < S, 0, index + 1)
        offset = tl.where(position < S, position, offset)
        page_tokens = tl.where(position < S, S, page_tokens)
    number = tl.load(words_ptr + num_numbers + row * width + index, mask=b_known, other=0)
    address = tl.load(words_ptr + number, mask=b_known, other=0) >> RUNG_BITS
    tl.store(ids_ptr + o_t, tl.where(token_id < 0, last, token_id), mask=b_t)
    tl.store(positions_ptr + o_t, tl.maximum(position, 0), mask=b_t)
    tl.store(lengths_ptr + o_t, (position + 1).to(tl.int32), mask=b_t)
    tl.store(token_rows_ptr + 2 * o_t, tl.where(b_known, address // row_nbytes + offset, -1), mask=b_t)
    tl.store(token_rows_ptr + 2 * o_t + 1, page_tokens, mask=b_t)


@triton.jit(do_not_specialize=["num_rows", "size", "num_numbers", "width", "first"])
def entry_words_kernel(
    words_ptr, rows_ptr, out_ptr, num_rows, size, num_numbers, width, first, BLOCK: tl.constexpr
):  # fmt: skip
    o_word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_word = o_word < size
    row = tl.load(rows_ptr + o_word % num_rows, mask=b_word, other=0)
    number = tl.load(words_ptr + num_numbers + row * width + first + o_word // num_rows, mask=b_word, other=0)
    tl.store(out_ptr + o_word, tl.load(words_ptr + number, mask=b_word, other=0), mask=b_word)


def update_triton(tables: BlockWords, step_input: Tensor, num_tokens: int) -> None:
    """Same contract as ``qkv_engine.kernels.block_tables.update``."""
    first = HEADER + 3 * num_tokens
    update_kernel[(MAX_UPDATES // BLOCK,)](step_input, tables.words, first, BLOCK=BLOCK, num_warps=4, **FUSED)


def place_triton(
    tables: BlockWords, step_input: Tensor, num_tokens: int, last_tokens: Tensor, row_nbytes: int
) -> Placed:
    """Same contract as ``qkv_engine.kernels.block_tables.place``."""

    def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=step_input.device)

    ids, positions, token_rows = make(num_tokens), make(num_tokens), make(num_tokens, 2)
    lengths = make(num_tokens, dtype=torch.int32)
    place_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        step_input,
        tables.words,
        last_tokens,
        ids,
        positions,
        lengths,
        token_rows,
        num_tokens,
        tables.num_numbers,
        tables.width,
        row_nbytes,
        HEADER=HEADER,
        RUNG_BITS=RUNG_BITS,
        S=tables.sink_tokens,
        T=tables.block_tokens,
        BLOCK=BLOCK,
        num_warps=4,
        **FUSED,
    )
    rows = step_input[HEADER + 2 * num_tokens : HEADER + 3 * num_tokens]
    return Placed(ids, positions, rows, lengths, token_rows)


def entry_words_triton(tables: BlockWords, rows: Tensor, first: int, number: int) -> Tensor:
    """Same contract as ``qkv_engine.kernels.block_tables.entry_words``; ``rows`` contiguous."""
    out = torch.empty(number, len(rows), dtype=torch.int64, device=rows.device)
    sizes = len(rows), out.numel(), tables.num_numbers, tables.width, first
    grid = (triton.cdiv(out.numel(), BLOCK),)
    entry_words_kernel[grid](tables.words, rows, out, *sizes, BLOCK=BLOCK, num_warps=4, **FUSED)
    return out
