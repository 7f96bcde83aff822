"""Tokens of prompts in Triton: chunks are condensed side by side, then each head's state passes them in their order."""

from __future__ import annotations

import triton
import triton.language as tl

from .format_kernels import conv_of, load_state, store_state
from .step_kernels import load_unit, log_kept, silu


@triton.jit
def conv_chunk_kernel(
    memory_ptr, x_ptr, weight_ptr, words_ptr, items_ptr, chunks_ptr, out_ptr, stride_x,
    C: tl.constexpr, W: tl.constexpr, CONVS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The short convolution of a tile of channels in one chunk, ROWS tokens at a time.

    Shapes:  x [N, C], rows ``stride_x`` apart;  weight [C, W];  words [I];  items [I, 4];  chunks [M, 3];
             out [N, C];  conv, ``CONVS`` bytes into a state: [C, W - 1]
    Grid:    (M * cdiv(C, TILE),)
    """
    TILES: tl.constexpr = (C + TILE - 1) // TILE
    p_chunk = chunks_ptr + tl.program_id(0) // TILES * 3
    o_c = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    m_c = o_c < C
    weights = ()
    for i in tl.static_range(W):
        weights += (tl.load(weight_ptr + o_c * W + i, mask=m_c, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    first, number, item = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)
    begin, is_first = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 2)
    p_state = conv_of(memory_ptr, tl.load(words_ptr + item), CONVS)
    p_conv = p_state.to(tl.pointer_type(x_ptr.dtype.element_ty)) + o_c[None, :] * (W - 1)
    end = first + number
    for start in range(first, end, ROWS):
        o_t = start + tl.arange(0, ROWS)
        b_sum = tl.zeros([ROWS, TILE], dtype=tl.float32)
        for i in tl.static_range(W):
            o_row = o_t + (i - W + 1)
            m_here = ((o_t < end) & (o_row >= begin))[:, None] & m_c[None, :]
            p_x = x_ptr + o_row.to(tl.int64)[:, None] * stride_x + o_c[None, :]
            b_x = tl.load(p_x, mask=m_here, other=0.0).to(tl.float32)
            if start == begin and is_first == 0 and i < W - 1:
                m_old = ((o_t < end) & (o_row < begin))[:, None] & m_c[None, :]
                b_x += tl.load(p_conv + (o_row - begin + (W - 1))[:, None], mask=m_old, other=0.0).to(tl.float32)
            b_sum += b_x * weights[i][None, :]
        p_out = out_ptr + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
        tl.store(p_out, silu(b_sum).to(out_ptr.dtype.element_ty), mask=(o_t < end)[:, None] & m_c[None, :])


@triton.jit
def conv_state_kernel(
    memory_ptr, x_ptr, words_ptr, items_ptr, stride_x,
    C: tl.constexpr, W: tl.constexpr, CONVS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The last inputs of a tile of channels become the convolution's state, once all chunks have read the old one.

    Shapes:  x [N, C], rows ``stride_x`` apart;  words [I];  items [I, 4]
    Grid:    (I * cdiv(C, TILE),)
    """
    TILES: tl.constexpr = (C + TILE - 1) // TILE
    item = tl.program_id(0) // TILES
    o_c = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    m_c = o_c < C
    p_item = items_ptr + item * 4
    first, number, is_first = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2)
    p_state = conv_of(memory_ptr, tl.load(words_ptr + item), CONVS)
    p_conv = p_state.to(tl.pointer_type(x_ptr.dtype.element_ty)) + o_c * (W - 1)
    for i in tl.static_range(W - 1):
        row = number + (i - W + 1)  # of the item's; those before it are later entries of the state than any written yet
        p_x = x_ptr + (first + row).to(tl.int64) * stride_x + o_c
        b_new = tl.load(p_x, mask=o_c < tl.where(row >= 0, C, 0), other=0.0)
        b_old = tl.load(p_conv + (row + (W - 1)), mask=o_c < tl.where((row < 0) & (is_first == 0), C, 0), other=0.0)
        tl.store(p_conv + i, tl.where(row >= 0, b_new, b_old), mask=m_c)


@triton.jit
def load_gates(b_ptr, a_ptr, decay, dt_bias, o_row, m_t, stride_gate):
    """beta, and the sums of g up to each token and over all, of the tokens of a chunk in one head."""
    o_gate = o_row * stride_gate
    b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + o_gate, mask=m_t, other=0.0).to(tl.float32)))
    b_g = log_kept(tl.load(a_ptr + o_gate, mask=m_t, other=0.0), decay, dt_bias)
    b_g = tl.where(m_t, b_g, 0.0)
    return tl.where(m_t, b_beta, 0.0), tl.cumsum(b_g, 0), tl.sum(b_g, 0)


@triton.jit
def product(b_left, b_right, PRECISION: tl.constexpr):
    """A product whose right side is rounded to the type of the left one; float32 sums."""
    return tl.dot(b_left, b_right.to(b_left.dtype), input_precision=PRECISION)


@triton.jit
def inverse(b_lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I less a matrix [CHUNK, CHUNK] of zeros on and above its diagonal.

    Blocks on the diagonal by forward substitution, side by side. With D, their inverses, and T = D times what is below
    the blocks, of which the fourth power is 0, the whole is (I + T + T^2 + T^3) D.
    """
    SIDE: tl.constexpr = CHUNK // 4
    o_b, o_s, o_t = tl.arange(0, 4), tl.arange(0, SIDE), tl.arange(0, CHUNK)
    is_same = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    b_blocks = tl.sum(tl.where(is_same, tl.reshape(b_lower, (4, SIDE, 4, SIDE)), 0.0), 2)
    for i in range(1, SIDE):  # rows before i are those of the inverse, but for its ones
        b_row = tl.sum(tl.where((o_s == i)[None, :, None], b_blocks, 0.0), 1)
        b_row += tl.sum(b_row[:, :, None] * b_blocks, 1)
        b_blocks = tl.where((o_s == i)[None, :, None], b_row[:, None, :], b_blocks)
    b_blocks = tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, b_blocks)
    b_d = tl.reshape(tl.where(is_same, b_blocks[:, :, None, :], 0.0), (CHUNK, CHUNK))
    is_block = (o_t // SIDE)[:, None] == (o_t // SIDE)[None, :]
    b_t = tl.dot(b_d, tl.where(is_block, 0.0, b_lower), input_precision=PRECISION)
    b_powers = b_t + tl.dot(b_t, b_t, input_precision=PRECISION)
    b_powers = b_t + tl.dot(b_t, b_powers, input_precision=PRECISION)
    return b_d + tl.dot(b_powers, b_d, input_precision=PRECISION)


@triton.jit
def chunk_solve_kernel(
    x_ptr, b_ptr, a_ptr, decay_ptr, dt_bias_ptr, chunks_ptr, written_ptr, forgotten_ptr, stride_gate,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk writes into a zero state, and what it takes of the state before it: ``written - forgotten S``.

    Both are the rows of (I + lower(beta K K' D))^-1, applied to beta V and to beta exp(G) K; see ``cpu.delta_rule``.
    Shapes:  x [N, 2 HK DK + HV DV];  b, a [N, HV], rows ``stride_gate`` apart;  chunks [M, 3];
             written [M, HV, CHUNK, DV];  forgotten [M, HV, CHUNK, DK]
    Grid:    (M * HV,)
    """
    i_m, i_h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    first, number = tl.load(chunks_ptr + i_m * 3), tl.load(chunks_ptr + i_m * 3 + 1)
    o_t, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    o_row, m_t = (first + o_t).to(tl.int64), o_t < number
    decay, dt_bias = tl.load(decay_ptr + i_h), tl.load(dt_bias_ptr + i_h)
    b_beta, b_total, _ = load_gates(b_ptr + i_h, a_ptr + i_h, decay, dt_bias, o_row, m_t, stride_gate)
    p_x = x_ptr + o_row[:, None] * (2 * HK * DK + HV * DV)
    p_k = p_x + (HK + i_h // (HV // HK)) * DK + o_k[None, :]
    b_k = load_unit(p_k, m_t[:, None] & (o_k < DK)[None, :])
    is_lower = o_t[:, None] > o_t[None, :]
    b_decay = tl.exp(tl.where(is_lower, b_total[:, None] - b_total[None, :], -float("inf")))
    b_lower = -b_beta[:, None] * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_decay
    b_rows = inverse(b_lower, CHUNK, PRECISION)
    b_forgotten = tl.dot(b_rows, b_k * (b_beta * tl.exp(b_total))[:, None], input_precision=PRECISION)
    p_forgotten = forgotten_ptr + ((i_m * HV + i_h) * CHUNK + o_t[:, None]) * DK + o_k[None, :]
    tl.store(p_forgotten, b_forgotten.to(forgotten_ptr.dtype.element_ty), mask=(o_k < DK)[None, :])
    for start in range(0, DV, BLOCK_V):
        m_v = start + o_v < DV
        p_v = p_x + 2 * HK * DK + i_h * DV + start + o_v[None, :]
        b_v = tl.load(p_v, mask=m_t[:, None] & m_v[None, :], other=0.0).to(tl.float32)
        b_written = tl.dot(b_rows, b_v * b_beta[:, None], input_precision=PRECISION)
        p_written = written_ptr + ((i_m * HV + i_h) * CHUNK + o_t[:, None]) * DV + start + o_v[None, :]
        tl.store(p_written, b_written.to(written_ptr.dtype.element_ty), mask=m_v[None, :])


@triton.jit
def chunk_scan_kernel(
    memory_ptr, x_ptr, b_ptr, a_ptr, decay_ptr, dt_bias_ptr, words_ptr, items_ptr, written_ptr, forgotten_ptr,
    out_ptr, stride_gate,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    FORMATS: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head's state pass all chunks of a request, which read it and write it.

    Shapes:  as in ``chunk_solve_kernel``;  words [I];  items [I, 4];  out [N, HV, DV]
             recurrent: see ``load_state``; it is rounded once, behind the last chunk
    Grid:    (I * HV * cdiv(DV, BLOCK_V),)
    """
    TILES: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    i_h, item = tl.program_id(0) // TILES % HV, tl.program_id(0) // (TILES * HV)
    o_t, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < DK, o_v < DV
    p_item = items_ptr + item * 4
    first, number, is_first, i_m = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
    decay, dt_bias = tl.load(decay_ptr + i_h), tl.load(dt_bias_ptr + i_h)
    word = tl.load(words_ptr + item)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    b_state = load_state(memory_ptr, word, i_h, o_k, o_v, tl.where(is_first == 0, DK, 0), DV, DK, DV, FORMATS)
    is_seen = o_t[:, None] >= o_t[None, :]
    for start in range(0, number, CHUNK):
        o_row, m_t = (first + start + o_t).to(tl.int64), start + o_t < number
        _, b_total, last = load_gates(b_ptr + i_h, a_ptr + i_h, decay, dt_bias, o_row, m_t, stride_gate)
        o_chunk = ((i_m + start // CHUNK).to(tl.int64) * HV + i_h) * CHUNK + o_t[:, None]
        b_forgotten = tl.load(forgotten_ptr + o_chunk * DK + o_k[None, :], mask=m_k[None, :], other=0.0)
        b_new = tl.load(written_ptr + o_chunk * DV + o_v[None, :], mask=m_v[None, :], other=0.0).to(tl.float32)
        b_new -= product(b_forgotten, b_state, PRECISION)
        p_q = x_ptr + o_row[:, None] * (2 * HK * DK + HV * DV) + i_h // (HV // HK) * DK + o_k[None, :]
        m_q = m_t[:, None] & m_k[None, :]
        b_q, b_k = (load_unit(p_q, m_q) * (DK**-0.5)).to(TYPE), load_unit(p_q + HK * DK, m_q).to(TYPE)
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        b_scores *= tl.exp(tl.where(is_seen, b_total[:, None] - b_total[None, :], -float("inf")))
        b_out = product(b_q, b_state, PRECISION) * tl.exp(b_total)[:, None]
        b_out += product(b_scores.to(TYPE), b_new, PRECISION)
        p_out = out_ptr + (o_row[:, None] * HV + i_h) * DV + o_v[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])
        b_new *= tl.exp(last - b_total)[:, None]
        b_state = b_state * tl.exp(last) + product(tl.trans(b_k), b_new, PRECISION)
    store_state(memory_ptr, word, b_state, i_h, o_k, o_v, DK, DV, DK, DV, FORMATS)
