"""Products of experts with quantized weights in Triton, on tensor cores: codes become 16-bit floats in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.code_tile import finished, load_x, product
from ..linear.scales import load_groups, minus_of, scale_of, zeros_after
from ..linear.unpack import unpack_4_bits, unpack_8_bits, unpack_float4
from ..overlap import let_next_start, wait_for_previous
from ..product_parts import load_bias, load_columns, store_tile, weight_rows


@triton.jit
def expert_codes_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr,
    N: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICES: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
    WAITS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``expert_tile_kernel`` with quantized weights.

    Without ``tiles`` each pair of token and expert is a tile of its own, its place is its number, and ``order`` holds
    the pairs' experts. A step takes SPANS spans of columns, as ``code_tile_kernel`` does; the last may end beyond the
    row. With SLICES each warp has columns of its own. With SCALED the elements are scaled, otherwise sums of columns
    that share their scales.

    Shapes:  x [tokens or places, K];  codes [X N, bytes];  scales, zeros [X N, GROUPS], if there are several in words,
                 with BLOCKS of blocks, of 4-bit floats int32 [X N, GROUPS], words of 4 exponents
             bias [X, N] or None;  out [places, N / 2] or [pairs, N];  order [places];  tiles [T, 4] or None
    Grid:    (cdiv(N, BLOCK_N), T or the number of pairs)
    """
    GATED: tl.constexpr = ACTIVATION is not None
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    IS_FLOAT4: tl.constexpr = KIND == "float4"
    HALVES: tl.constexpr = IS_FLOAT4 or KIND == "int4"
    WIDTH: tl.constexpr = SPAN // 2 if HALVES else SPAN  # bytes of a span
    PAIRED: tl.constexpr = 2 if IS_FLOAT4 else 1  # spans, of which a row has all or none
    NUMBER: tl.constexpr = (K + SPAN * PAIRED - 1) // (SPAN * PAIRED) * PAIRED
    PART: tl.constexpr = (NUMBER + SLICES * SPANS - 1) // (SLICES * SPANS) * SPANS  # spans of a slice
    IS_WHOLE: tl.constexpr = PART * SLICES == NUMBER
    STEP: tl.constexpr = SPAN * SPANS * SLICES  # columns
    ROW: tl.constexpr = NUMBER * WIDTH if HALVES else K
    IS_CHANNEL: tl.constexpr = GROUPS == 1 and not IS_FLOAT4
    HAS_GROUPS: tl.constexpr = not (IS_CHANNEL or IS_FLOAT4)
    IN_WORDS: tl.constexpr = scales_ptr.dtype.element_ty == tl.int32
    SHARED: tl.constexpr = 2 if IN_WORDS and GROUP == SPAN and SPANS % 2 == 0 else 1  # spans that have a word together
    EVICTION: tl.constexpr = "evict_first" if BLOCK_M <= 32 else ""  # larger tiles have neighbours that read it again
    i_p, i_t = tl.program_id(0), tl.program_id(1)
    o_n = weight_rows(i_p, N, GATED, N % BLOCK_N == 0, BLOCK_N)
    if tiles_ptr is None:
        # Down reads its experts before it waits: they ended before gate and up let it start.
        if GATED:
            wait_for_previous(OVERLAP)
        let_next_start(OVERLAP)
        i_x, first, end = tl.load(order_ptr + i_t, cache_modifier=".cg"), i_t, i_t + 1
    else:
        let_next_start(OVERLAP)
        wait_for_previous(OVERLAP)
        p_tile = tiles_ptr + i_t * 4
        i_x, first, end = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
        if i_x < 0:
            return
    o_place = first + tl.arange(0, BLOCK_M)
    m_m = o_place < end
    o_pair = o_place if tiles_ptr is None else tl.load(order_ptr + o_place, mask=m_m, other=0)
    o_row = (o_pair // TOP_K if GATED else o_place).to(tl.int64)
    o_n += i_x.to(tl.int64) * N
    o_k = tl.arange(0, WIDTH)
    o_scale = o_n // 128 if BLOCKS else o_n
    if SLICES == 1:
        o_k, m_x, o_first, o_span = o_k[None, :], m_m[:, None], 0, 0
        p_codes, p_x = codes_ptr + o_n[:, None] * ROW, x_ptr + o_row[:, None] * K
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        o_k, m_x, o_first = o_k[None, None, :], m_m[None, :, None], tl.arange(0, SLICES) * PART
        p_codes, p_x = codes_ptr + o_n[None, :, None] * ROW, x_ptr + o_row[None, :, None] * K
        b_acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
        if not IS_CHANNEL:
            o_scale = o_scale[None, :]
        o_first, o_span = o_first[:, None, None], o_first[:, None]
    b_channel_minus = None
    if IS_CHANNEL:
        b_channel = tl.load(scales_ptr + o_scale).to(tl.float32)
        if zeros_ptr is not None:
            b_channel_minus = minus_of(tl.load(zeros_ptr + o_scale), 0, DTYPE)
    if tiles_ptr is None and not GATED:
        wait_for_previous(OVERLAP)

    for i in tl.range(0, PART, SPANS, num_stages=STAGES):
        for part in tl.static_range(SPANS):
            b_part, b_factor = b_acc, None
            b_minus = b_channel_minus
            if HAS_GROUPS:
                o_group = _group(o_span + i + part, SPAN, GROUP, GROUPS, IS_WHOLE)
                if part % SHARED == 0:
                    b_words = load_groups(scales_ptr, o_scale, o_group, GROUPS, 2 if IN_WORDS else 1)
                    if zeros_ptr is not None:
                        b_zeros = load_groups(zeros_ptr, o_scale, o_group, GROUPS, 4 if IN_WORDS else 1)
                b_scale = scale_of(b_words, o_group, DTYPE)
                if zeros_ptr is not None:
                    b_minus = minus_of(b_zeros, o_group, DTYPE)
                if SCALED:
                    b_factor = b_scale.to(DTYPE)
                else:
                    b_part = zeros_after(b_scale, b_acc.shape)
            o_byte, o_column = (o_first + i + part) * WIDTH + o_k, (o_first + i + part) * SPAN + o_k
            b_x = load_x(p_x + o_column, m_x, o_column, K, STEP)
            if HALVES:
                b_codes = load_columns(p_codes, o_byte, ROW, WIDTH * SPANS * SLICES, EVICTION)
                if IS_FLOAT4:
                    if part % 2 == 0:
                        o_word = _group((o_span + i) // 2 + part // 2, 1, 1, GROUPS, IS_WHOLE)
                        b_exponents = tl.expand_dims(load_groups(scales_ptr, o_scale, o_word, GROUPS, 1), -1)
                    b_exponent = (b_exponents >> (part % 2 * 16)) & 255
                    b_high_exponent = (b_exponents >> (part % 2 * 16 + 8)) & 255
                    b_low, b_high = unpack_float4(b_codes, b_exponent, b_high_exponent, DTYPE, ASM)
                else:
                    b_low, b_high = unpack_4_bits(b_codes, b_minus, b_factor, DTYPE, ASM)
                b_part = product(b_low, b_x, b_part, SLICES)
                b_x = load_x(p_x + o_column + WIDTH, m_x, o_column + WIDTH, K, STEP)
                b_part = product(b_high, b_x, b_part, SLICES)
            else:
                b_codes = load_columns(p_codes, o_byte, K, STEP, EVICTION)
                b_part = product(unpack_8_bits(b_codes, KIND, DTYPE, ASM), b_x, b_part, SLICES)
            if HAS_GROUPS and not SCALED:
                b_acc += b_part * b_scale
            else:
                b_acc = b_part
        if WAITS and ASM:
            b_acc = finished(b_acc)
    if SLICES > 1:
        b_acc = tl.sum(b_acc, 0)
    if IS_CHANNEL:
        b_acc *= tl.reshape(b_channel, [BLOCK_N, 1])
    o_to = (o_place if GATED else o_pair).to(tl.int64)
    store_tile(b_acc, load_bias(bias_ptr, o_n), out_ptr, i_p, o_to, m_m, N, GATED, ACTIVATION)


@triton.jit
def _group(o_span, SPAN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """The group of a span, the last one for spans beyond the row."""
    o_group = o_span if SPAN == GROUP else o_span * SPAN // GROUP
    return o_group if IS_WHOLE else tl.minimum(o_group, GROUPS - 1)
