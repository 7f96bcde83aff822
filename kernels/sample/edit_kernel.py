"""Masks, bias and penalties: device code. Launch without fused multiply-add."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["BLOCKS"])
def copy_kernel(
    logits_ptr, penalties_ptr, edited_ptr, peaks_ptr, stride, V, BLOCKS, TILE: tl.constexpr,
):  # fmt: skip
    """Logits in float32, or -inf in rows that have only their allowed tokens; the peaks are of the raw ones.

    Shapes:  logits [M, V];  penalties [M, 4] fp32;  edited [M, V] fp32;  peaks [M] fp32, -inf before, +inf for a NaN
    Grid:    (M, S); a share is BLOCKS tiles of TILE tokens
    """
    i_m = tl.program_id(0)
    p_row = logits_ptr + i_m.to(tl.int64) * stride
    p_out = edited_ptr + i_m.to(tl.int64) * V
    is_restricted = tl.load(penalties_ptr + 4 * i_m + 3) != 0
    b_peak = tl.full((TILE,), float("-inf"), tl.float32)
    for i in range(BLOCKS):
        o_v = (tl.program_id(1) * BLOCKS + i) * TILE + tl.arange(0, TILE)
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_peak = tl.maximum(b_peak, tl.where(b_x == b_x, b_x, float("inf")))
        tl.store(p_out + o_v, tl.where(is_restricted, float("-inf"), b_x), mask=o_v < V)
    tl.atomic_max(peaks_ptr + i_m, tl.max(b_peak, 0))


@triton.jit(do_not_specialize=["START", "END"])
def edit_kernel(
    source_ptr, penalties_ptr, entry_rows_ptr, tokens_ptr, counts_ptr, biases_ptr, edited_ptr, stride, V, START, END,
    TILE: tl.constexpr,
):  # fmt: skip
    """Applies entries START to END; see ``edit``. An entry whose token is no column of the logits does nothing.

    Shapes:  source [M, V], may be ``edited``;  rows, tokens, counts [E] int32;  biases [E] fp32;  edited [M, V] fp32
    Grid:    (S,); TILE entries each
    """
    o_e = START + tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_e = o_e < END
    b_row = tl.load(entry_rows_ptr + o_e, mask=m_e, other=0)
    b_token = tl.load(tokens_ptr + o_e, mask=m_e, other=0)
    m_e = m_e & (b_token >= 0) & (b_token < V)  # tokens were checked before; a wrong one would reach another row
    b_count = tl.load(counts_ptr + o_e, mask=m_e, other=-1)
    b_x = tl.load(source_ptr + b_row.to(tl.int64) * stride + b_token, mask=m_e, other=0.0).to(tl.float32)
    b_x = b_x + tl.load(biases_ptr + o_e, mask=m_e, other=0.0)
    m_seen = b_count >= 0
    p_penalty = penalties_ptr + 4 * b_row
    b_repetition = tl.load(p_penalty, mask=m_seen, other=1.0)
    b_frequency = tl.load(p_penalty + 1, mask=m_seen, other=0.0)
    b_presence = tl.load(p_penalty + 2, mask=m_seen, other=0.0)
    b_less = tl.where(b_x > 0, tl.div_rn(b_x, b_repetition), b_x * b_repetition)
    b_less = b_less - b_frequency * b_count.to(tl.float32) - tl.where(b_count > 0, b_presence, 0.0)
    tl.store(edited_ptr + b_row.to(tl.int64) * V + b_token, tl.where(m_seen, b_less, b_x), mask=m_e)
