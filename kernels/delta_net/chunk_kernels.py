"""Tokens of prompts in Triton: chunks are condensed side by side, then each head's state passes them in their order."""

from __future__ import annotations

import triton
import triton.language as tl

from .format_kernels import conv_of, load_state, store_state
from .step_kernels import LOG2_E, log_kept, silu, unit


@triton.jit
def load_rows(x_ptr, stride_x, o_c, is_there, first, end, ROWS: tl.constexpr):
    """Rows of x from ``first`` on, as a tuple; zeros from ``end`` on."""
    rows = ()
    for r in tl.static_range(ROWS):
        p_x = x_ptr + tl.full([1, 1], first + r, tl.int64) * stride_x + o_c
        rows += (tl.load(p_x, mask=is_there > tl.where(first + r < end, 0, 1), other=0.0),)  # type: ignore[assignment]
    return rows


@triton.jit
def conv_chunk_kernel(
    memory_ptr, x_ptr, weight_ptr, words_ptr, items_ptr, chunks_ptr, out_ptr, stride_x,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr, CONVS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The short convolution of a chunk: heads of q and k, which come out with length 1, or as many channels of v.

    q is scaled by the root of 1 / DK as well. Each row is loaded once: ROWS of them while those before are computed,
    of which the last W - 1 stay.
    Shapes:  x [N, C], rows ``stride_x`` apart;  weight [C, W];  words [I];  items [I, 4];  chunks [M, 3];
             out [M, CHUNK, C], zeros behind a chunk's tokens;  conv, ``CONVS`` bytes into a state: [C, W - 1]
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
    p_out = out_ptr + tl.program_id(1).to(tl.int64) * (CHUNK * C) + o_c
    coming = load_rows(x_ptr, stride_x, o_c, is_there, first, first + number, ROWS)
    for start in range(0, number, ROWS):
        rows = before + coming
        coming = load_rows(x_ptr, stride_x, o_c, is_there, first + start + ROWS, first + number, ROWS)
        for r in tl.static_range(ROWS):
            b_sum = tl.zeros([HEADS, BLOCK_K], dtype=tl.float32)
            for i in tl.static_range(W):
                b_sum += rows[r + i].to(tl.float32) * weights[i]
            b_out = silu(b_sum).to(DTYPE)
            if is_head:
                b_out = (unit(b_out.to(tl.float32)) * factor).to(DTYPE)
            tl.store(p_out + (start + r) * C, b_out, mask=is_there > tl.where(start + r < number, 0, 1))
        before = ()
        for i in tl.static_range(W - 1):
            before += (rows[ROWS + i],)  # type: ignore[assignment]
    for r in range(number, CHUNK):
        tl.store(p_out + r * C, tl.zeros([HEADS, BLOCK_K], DTYPE), mask=is_there > 0)


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
    p_item = items_ptr + item * 4
    first, number, is_first = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2)
    m_c = o_c < tl.where(number > 0, C, 0)  # padding has no tokens, and no state
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
    x_ptr, b_ptr, a_ptr, decay_ptr, dt_bias_ptr, chunks_ptr, solved_ptr, scores_ptr, kept_ptr, stride_gate,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All of a chunk that depends neither on the state before it nor on its values.

    It writes ``solved (V - 2^G K S)`` to a state S, with ``solved`` = (I + lower(beta K K' D))^-1 beta; see
    ``cpu.delta_rule``. Its outputs see its own writes by ``scores`` = lower(Q K' D).
    Shapes:  x [M, CHUNK, 2 HK DK + HV DV], of ``conv_chunk_kernel``;  b, a [N, HV], rows ``stride_gate`` apart;
             chunks [M, 3];  solved, scores [M, HV, CHUNK, CHUNK];
             kept [M, HV, CHUNK] float32, G, the log of base 2 of what a state keeps up to a token
    Grid:    (M * HV,)
    """
    i_m, i_h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    first, number = tl.load(chunks_ptr + i_m * 3), tl.load(chunks_ptr + i_m * 3 + 1)
    o_t, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    m_t, m_k = o_t < number, (o_k < DK)[None, :]
    p_x = x_ptr + (i_m * CHUNK + o_t)[:, None] * (2 * HK * DK + HV * DV)
    p_q = p_x + i_h // (HV // HK) * DK + o_k[None, :]
    b_q = tl.load(p_q, mask=m_k, other=0.0)
    b_k = tl.load(p_q + HK * DK, mask=m_k, other=0.0)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    o_gate = (first + o_t).to(tl.int64) * stride_gate + i_h
    b_beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + o_gate, mask=m_t, other=0.0).to(tl.float32)))
    b_beta = tl.where(m_t, b_beta, 0.0)
    decay, dt_bias = tl.load(decay_ptr + i_h), tl.load(dt_bias_ptr + i_h)
    b_kept = tl.where(m_t, log_kept(tl.load(a_ptr + o_gate, mask=m_t, other=0.0), decay, dt_bias), 0.0)
    b_kept = tl.cumsum(b_kept * LOG2_E, 0)
    o_chunk = (i_m * HV + i_h) * CHUNK + o_t
    tl.store(kept_ptr + o_chunk, b_kept)
    is_seen = o_t[:, None] >= o_t[None, :]
    b_decay = tl.exp2(tl.where(is_seen, b_kept[:, None] - b_kept[None, :], -float("inf")))
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_decay
    tl.store(scores_ptr + o_chunk[:, None] * CHUNK + o_t[None, :], b_scores.to(TYPE))
    b_products = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_decay
    b_lower = tl.where(o_t[:, None] > o_t[None, :], -b_beta[:, None] * b_products, 0.0)
    INNER: tl.constexpr = tl.float16 if TYPE.primitive_bitwidth == 16 else tl.float32
    b_solved = inverse(b_lower, CHUNK, INNER, PRECISION) * b_beta[None, :]
    tl.store(solved_ptr + o_chunk[:, None] * CHUNK + o_t[None, :], b_solved.to(TYPE))


@triton.jit
def chunk_scan_kernel(
    memory_ptr, x_ptr, words_ptr, items_ptr, solved_ptr, scores_ptr, kept_ptr, out_ptr,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FORMATS: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head's state pass all chunks of a request, which read it and write it.

    All is transposed: what comes from the state is the left side of products, and never leaves the registers.
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
    b_state = tl.trans(b_state)
    for i in tl.range(0, (number + CHUNK - 1) // CHUNK, num_stages=STAGES):
        chunk = (i_m + i).to(tl.int64)
        p_x = x_ptr + (chunk * CHUNK + o_t)[:, None] * (2 * HK * DK + HV * DV)
        p_q = p_x + i_h // (HV // HK) * DK + o_k[None, :]
        b_q = tl.load(p_q, mask=m_k, other=0.0)
        b_k = tl.load(p_q + HK * DK, mask=m_k, other=0.0)
        b_v = tl.load(p_x + 2 * HK * DK + i_h * DV + o_v[None, :], mask=m_v, other=0.0)
        p_kept = kept_ptr + (chunk * HV + i_h) * CHUNK
        o_square = (chunk * HV + i_h) * (CHUNK * CHUNK) + o_t[:, None] * CHUNK + o_t[None, :]
        b_solved, b_scores = tl.load(solved_ptr + o_square), tl.load(scores_ptr + o_square)
        b_kept, last = tl.load(p_kept + o_t), tl.load(p_kept + CHUNK - 1)
        b_narrow, b_left = b_state.to(TYPE), tl.exp2(b_kept)[None, :]
        b_new = tl.dot(tl.trans(b_v), tl.trans(b_solved), input_precision=PRECISION)
        b_seen = tl.dot(b_narrow, tl.trans(b_k), input_precision=PRECISION) * -b_left
        b_out = tl.dot(b_narrow, tl.trans(b_q), input_precision=PRECISION) * b_left
        b_new = tl.dot(b_seen.to(TYPE), tl.trans(b_solved), b_new, input_precision=PRECISION)
        b_out = tl.dot(b_new.to(TYPE), tl.trans(b_scores), b_out, input_precision=PRECISION)
        b_new = (b_new * tl.exp2(last - b_kept)[None, :]).to(TYPE)
        b_state = tl.dot(b_new, b_k, b_state * tl.exp2(last), input_precision=PRECISION)
        o_row, m_t = (first + i * CHUNK + o_t).to(tl.int64)[:, None], (i * CHUNK + o_t < number)[:, None]
        tl.store(out_ptr + (o_row * HV + i_h) * DV + o_v[None, :], tl.trans(b_out.to(TYPE)), mask=m_t & m_v)
    num_v = tl.where(number > 0, DV, 0)  # padding has no tokens, and no state
    store_state(memory_ptr, word, tl.trans(b_state), i_h, o_k, o_v, DK, num_v, DK, DV, FORMATS)
