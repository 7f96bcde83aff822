"""Tokens of prompts in Triton: chunks are condensed side by side, then each head's state passes them in their order."""

from __future__ import annotations

import triton
import triton.language as tl

from .format_kernels import conv_of, load_state, store_state
from .step_kernels import log_kept, silu, unit


@triton.jit
def conv_chunk_kernel(
    memory_ptr, x_ptr, weight_ptr, words_ptr, items_ptr, chunks_ptr, out_ptr, stride_x,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, CONVS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The short convolution of a chunk: heads of q and k, which come out with length 1, or as many channels of v.

    q is scaled by the root of 1 / DK as well. Each row is loaded once, ROWS of them at a time, and its last W - 1 stay.
    Shapes:  x [N, C], rows ``stride_x`` apart;  weight [C, W];  words [I];  items [I, 4];  chunks [M, 3];
             out [N, C];  conv, ``CONVS`` bytes into a state: [C, W - 1]
    Grid:    (cdiv(2 HK, HEADS) + cdiv(HV DV, HEADS BLOCK_K), M); BLOCK_K is at least DK
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = (2 * HK + HEADS - 1) // HEADS  # of q and k
    TILE: tl.constexpr = HEADS * BLOCK_K
    C: tl.constexpr = 2 * HK * DK + HV * DV
    part = tl.program_id(0)
    is_head = part < PARTS
    o_h, o_k = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK_K)[None, :]
    i_h = part * HEADS + o_h
    v_first = 2 * HK * DK + (part - PARTS) * TILE
    if DK == BLOCK_K and 2 * HK % HEADS == 0 and HV * DV % TILE == 0:  # loads of 16 bytes, without masks
        o_c = tl.where(is_head, part * TILE, v_first) + (o_h * BLOCK_K + o_k)
        is_there = tl.full([HEADS, BLOCK_K], 1, tl.int32)
    else:
        o_c = tl.where(is_head, i_h * DK, v_first + o_h * BLOCK_K) + o_k
        is_there = (tl.where(is_head, o_k, o_c) < tl.where(is_head, tl.where(i_h < 2 * HK, DK, 0), C)).to(tl.int32)
    factor = tl.where(i_h < HK, DK**-0.5, 1.0)
    p_chunk = chunks_ptr + tl.program_id(1) * 3
    first, number, item = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)
    begin, is_first = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 2)
    p_state = conv_of(memory_ptr, tl.load(words_ptr + item), CONVS).to(tl.pointer_type(DTYPE)) + o_c * (W - 1)
    weights = ()
    for i in tl.static_range(W):
        weights += (tl.load(weight_ptr + o_c * W + i, mask=is_there > 0, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    before = ()  # rows before those of a turn; the state has those before the item's
    for i in tl.static_range(W - 1):
        row = first + (i - W + 1)
        m_new, m_old = is_there > tl.where(row < begin, 1, 0), is_there > tl.where(row < begin, is_first, 1)
        b_new = tl.load(x_ptr + row.to(tl.int64) * stride_x + o_c, mask=m_new, other=0.0)
        b_old = tl.load(p_state + (row - begin + (W - 1)), mask=m_old, other=0.0)
        before += (tl.where(row < begin, b_old, b_new),)  # type: ignore[assignment]
    end = first + number
    for start in range(first, end, ROWS):
        rows = before
        for r in tl.static_range(ROWS):
            p_x = x_ptr + tl.full([1, 1], start + r, tl.int64) * stride_x + o_c
            m_x = is_there > tl.where(start + r < end, 0, 1)
            rows += (tl.load(p_x, mask=m_x, other=0.0),)  # type: ignore[assignment]
        for r in tl.static_range(ROWS):
            b_sum = tl.zeros([HEADS, BLOCK_K], dtype=tl.float32)
            for i in tl.static_range(W):
                b_sum += rows[r + i].to(tl.float32) * weights[i]
            b_out = silu(b_sum).to(DTYPE)
            if is_head:
                b_out = (unit(b_out.to(tl.float32)) * factor).to(DTYPE)
            p_out = out_ptr + tl.full([1, 1], start + r, tl.int64) * C + o_c
            tl.store(p_out, b_out, mask=is_there > tl.where(start + r < end, 0, 1))
        before = ()
        for i in tl.static_range(W - 1):
            before += (rows[ROWS + i],)  # type: ignore[assignment]


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
def is_below(o_t, SIZE: tl.constexpr):
    """Where a matrix is below its blocks of ``SIZE`` on the diagonal, or above, within those of twice the size."""
    o_small, o_large = o_t // SIZE, o_t // (2 * SIZE)
    return (o_large[:, None] == o_large[None, :]) & (o_small[:, None] != o_small[None, :])


@triton.jit
def joined(b_inverse, b_below, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of blocks of twice the size, from those of blocks, D, and what is below these in them, E.

    They are (D^-1 - E)^-1 = D + D E D, since E D E is 0.
    """
    b_left = b_inverse.to(INNER)
    b_below = tl.dot(b_left, b_below.to(INNER), input_precision=PRECISION)
    return b_inverse + tl.dot(b_below.to(INNER), b_left, input_precision=PRECISION)


@triton.jit
def inverse(b_lower, CHUNK: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I less a matrix [CHUNK, CHUNK] of zeros on and above its diagonal: of ever larger blocks there.

    Products are of ``INNER``. No element exceeds 1, of which float16 has the bits of TF32, and needs no other order of
    a matrix in shared memory. Blocks of 16 lie side by side, each a warp's.
    """
    SMALL: tl.constexpr = (2, 4, 8)
    LARGE: tl.constexpr = (16, 32)
    tl.static_assert(CHUNK == 64)
    o_b, o_s, o_t = tl.arange(0, 4), tl.arange(0, 16), tl.arange(0, 64)
    is_block = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_blocks = tl.sum(tl.where(is_block, tl.reshape(b_lower, [4, 16, 4, 16]), 0.0), 2)
    b_pairs = tl.where(((o_s // 2)[:, None] == (o_s // 2)[None, :])[None, :, :], b_blocks, 0.0)
    b_small = tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, b_pairs)
    for i in tl.static_range(len(SMALL)):
        b_below = tl.where(is_below(o_s, SMALL[i])[None, :, :], b_blocks, 0.0)
        b_small = joined(b_small, b_below, INNER, PRECISION)
    b_inverse = tl.reshape(tl.where(is_block, b_small[:, :, None, :], 0.0), [64, 64])
    for i in tl.static_range(len(LARGE)):
        b_inverse = joined(b_inverse, tl.where(is_below(o_t, LARGE[i]), b_lower, 0.0), INNER, PRECISION)
    return b_inverse


@triton.jit
def chunk_solve_kernel(
    x_ptr, b_ptr, a_ptr, decay_ptr, dt_bias_ptr, chunks_ptr, written_ptr, forgotten_ptr, scores_ptr, kept_ptr,
    stride_gate,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All of a chunk that does not depend on the state before it.

    It writes ``written - forgotten S`` to a state S: the rows of (I + lower(beta K K' D))^-1, applied to beta V and to
    beta exp(G) K; see ``cpu.delta_rule``. Its outputs see its own writes by ``scores`` = lower(Q K' D).
    Shapes:  x [N, 2 HK DK + HV DV], of ``conv_chunk_kernel``;  b, a [N, HV], rows ``stride_gate`` apart;
             chunks [M, 3];  written [M, HV, CHUNK, DV];  forgotten [M, HV, CHUNK, DK];
             scores [M, HV, CHUNK, CHUNK];  kept [M, HV, CHUNK] float32, G, the log of what a state keeps up to a token
    Grid:    (M * HV,)
    """
    i_m, i_h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    first, number = tl.load(chunks_ptr + i_m * 3), tl.load(chunks_ptr + i_m * 3 + 1)
    o_t, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    o_row, m_t = (first + o_t).to(tl.int64), o_t < number
    m_k = m_t[:, None] & (o_k < DK)[None, :]
    p_x = x_ptr + o_row[:, None] * (2 * HK * DK + HV * DV)
    p_q = p_x + i_h // (HV // HK) * DK + o_k[None, :]
    b_q = tl.load(p_q, mask=m_k, other=0.0)
    b_k = tl.load(p_q + HK * DK, mask=m_k, other=0.0)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    o_gate = o_row * stride_gate + i_h
    b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + o_gate, mask=m_t, other=0.0).to(tl.float32)))
    b_beta = tl.where(m_t, b_beta, 0.0)
    decay, dt_bias = tl.load(decay_ptr + i_h), tl.load(dt_bias_ptr + i_h)
    b_kept = tl.cumsum(tl.where(m_t, log_kept(tl.load(a_ptr + o_gate, mask=m_t, other=0.0), decay, dt_bias), 0.0), 0)
    o_chunk = (i_m * HV + i_h) * CHUNK + o_t
    tl.store(kept_ptr + o_chunk, b_kept)
    is_seen = o_t[:, None] >= o_t[None, :]
    b_decay = tl.exp(tl.where(is_seen, b_kept[:, None] - b_kept[None, :], -float("inf")))
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_decay
    tl.store(scores_ptr + o_chunk[:, None] * CHUNK + o_t[None, :], b_scores.to(TYPE))
    b_products = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_decay
    b_lower = tl.where(o_t[:, None] > o_t[None, :], -b_beta[:, None] * b_products, 0.0)
    INNER: tl.constexpr = tl.float16 if TYPE.primitive_bitwidth == 16 else tl.float32
    b_rows = inverse(b_lower, CHUNK, INNER, PRECISION) * b_beta[None, :]
    b_forgotten = tl.dot((b_rows * tl.exp(b_kept)[None, :]).to(TYPE), b_k, input_precision=PRECISION)
    p_forgotten = forgotten_ptr + o_chunk[:, None] * DK + o_k[None, :]
    tl.store(p_forgotten, b_forgotten.to(TYPE), mask=(o_k < DK)[None, :])
    b_rows = b_rows.to(TYPE)
    for start in range(0, DV, BLOCK_V):
        m_v = (start + o_v < DV)[None, :]
        p_v = p_x + 2 * HK * DK + i_h * DV + start + o_v[None, :]
        b_v = tl.load(p_v, mask=m_t[:, None] & m_v, other=0.0)
        b_written = tl.dot(b_rows, b_v, input_precision=PRECISION)
        tl.store(written_ptr + o_chunk[:, None] * DV + start + o_v[None, :], b_written.to(TYPE), mask=m_v)


@triton.jit
def chunk_scan_kernel(
    memory_ptr, x_ptr, words_ptr, items_ptr, written_ptr, forgotten_ptr, scores_ptr, kept_ptr, out_ptr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
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
    m_k, m_v = (o_k < DK)[None, :], (o_v < DV)[None, :]
    p_item = items_ptr + item * 4
    first, number, is_first, i_m = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
    word = tl.load(words_ptr + item)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    b_state = load_state(memory_ptr, word, i_h, o_k, o_v, tl.where(is_first == 0, DK, 0), DV, DK, DV, FORMATS)
    for i in tl.range(0, (number + CHUNK - 1) // CHUNK, num_stages=STAGES):
        m_t = (i * CHUNK + o_t < number)[:, None]
        o_row = (first + i * CHUNK + o_t).to(tl.int64)[:, None]
        p_chunk = ((i_m + i).to(tl.int64) * HV + i_h) * CHUNK
        o_chunk = p_chunk + o_t[:, None]
        p_q = x_ptr + o_row * (2 * HK * DK + HV * DV) + i_h // (HV // HK) * DK + o_k[None, :]
        b_q = tl.load(p_q, mask=m_t & m_k, other=0.0)
        b_k = tl.load(p_q + HK * DK, mask=m_t & m_k, other=0.0)
        b_forgotten = tl.load(forgotten_ptr + o_chunk * DK + o_k[None, :], mask=m_k, other=0.0)
        b_written = tl.load(written_ptr + o_chunk * DV + o_v[None, :], mask=m_v, other=0.0)
        b_scores = tl.load(scores_ptr + o_chunk * CHUNK + o_t[None, :])
        b_kept, last = tl.load(kept_ptr + p_chunk + o_t), tl.load(kept_ptr + p_chunk + CHUNK - 1)
        b_narrow = b_state.to(TYPE)
        b_new = b_written.to(tl.float32) - tl.dot(b_forgotten, b_narrow, input_precision=PRECISION)
        b_out = tl.dot(b_q, b_narrow, input_precision=PRECISION) * tl.exp(b_kept)[:, None]
        b_out = tl.dot(b_scores, b_new.to(TYPE), b_out, input_precision=PRECISION)
        b_new = (b_new * tl.exp(last - b_kept)[:, None]).to(TYPE)
        b_state = tl.dot(tl.trans(b_k), b_new, b_state * tl.exp(last), input_precision=PRECISION)
        p_out = out_ptr + (o_row * HV + i_h) * DV + o_v[None, :]
        tl.store(p_out, b_out.to(TYPE), mask=m_t & m_v)
    store_state(memory_ptr, word, b_state, i_h, o_k, o_v, DK, DV, DK, DV, FORMATS)
