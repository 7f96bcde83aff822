"""Products of experts with quantized weights in Triton, on tensor cores: codes become 16-bit floats in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.code_tile import finished, load_x, product
from ..linear.unpack import minus_zeros, unpack_4_bits, unpack_8_bits, unpack_float4
from ..overlap import let_next_start, wait_for_previous
from ..product_parts import load_bias, load_columns, store_tile, weight_rows


@triton.jit
def expert_codes_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, order_ptr, tiles_ptr,
    N: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, WAITS: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``expert_tile_kernel`` with quantized weights.

    Without ``tiles`` each pair of token and expert is a tile of its own, its place is its number, and ``order`` holds
    the pairs' experts. A step takes SPANS spans of columns, as ``code_tile_kernel`` does; the last may end beyond the
    row. With SLICES each warp has columns of its own. With SCALED the elements are scaled, otherwise sums of columns
    that share their scales.

    Shapes:  x [tokens or places, K];  codes [X N, bytes];  scales, zeros [X N, cdiv(K, GROUP)], with BLOCKS of blocks,
                 of 4-bit floats int32 [X N, cdiv(K, 128)], words of 4 exponents
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
    GROUPS: tl.constexpr = NUMBER // 2 if IS_FLOAT4 else (K + GROUP - 1) // GROUP  # words, of 4-bit floats
    IS_CHANNEL: tl.constexpr = GROUPS == 1 and not IS_FLOAT4
    HAS_SUMS: tl.constexpr = not (IS_CHANNEL or SCALED)  # that are scaled
    HAS_GROUPS: tl.constexpr = not (IS_CHANNEL or IS_FLOAT4)  # whose scales are loaded before their step
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
    o_scale = (o_n // 128 if BLOCKS else o_n) * GROUPS
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
    scales, zeros = (), ()
    for part in tl.static_range(SPANS if HAS_GROUPS else 1 if IS_CHANNEL else 0):
        o_group = o_scale
        if HAS_GROUPS:
            o_group += _group(o_span + part, SPAN, GROUP, GROUPS, IS_WHOLE)
        scales += (tl.load(scales_ptr + o_group),)  # type: ignore[assignment]
        if zeros_ptr is not None:
            zeros += (tl.load(zeros_ptr + o_group),)  # type: ignore[assignment]
    if tiles_ptr is None and not GATED:
        wait_for_previous(OVERLAP)

    for i in tl.range(0, PART, SPANS, num_stages=STAGES):
        if HAS_GROUPS:
            next_scales, next_zeros = (), ()  # of the next step, on their way during this one
            for part in tl.static_range(SPANS):
                ahead = tl.minimum(i + SPANS, PART - SPANS) + part
                o_group = o_scale + _group(o_span + ahead, SPAN, GROUP, GROUPS, IS_WHOLE)
                next_scales += (tl.load(scales_ptr + o_group),)  # type: ignore[assignment]
                if zeros_ptr is not None:
                    next_zeros += (tl.load(zeros_ptr + o_group),)  # type: ignore[assignment]
        for part in tl.static_range(SPANS):
            b_part = tl.zeros_like(b_acc) if HAS_SUMS else b_acc
            o_byte, o_column = (o_first + i + part) * WIDTH + o_k, (o_first + i + part) * SPAN + o_k
            b_x = load_x(p_x + o_column, m_x, o_column, K, STEP)
            if HALVES:
                b_codes = load_columns(p_codes, o_byte, ROW, WIDTH * SPANS * SLICES, EVICTION)
                if IS_FLOAT4:
                    if part % 2 == 0:
                        o_word = o_scale + _group((o_span + i) // 2 + part // 2, 1, 1, GROUPS, IS_WHOLE)
                        b_exponents = tl.expand_dims(tl.load(scales_ptr + o_word), -1)
                    b_exponent = (b_exponents >> (part % 2 * 16)) & 255
                    b_high_exponent = (b_exponents >> (part % 2 * 16 + 8)) & 255
                    b_low, b_high = unpack_float4(b_codes, b_exponent, b_high_exponent, DTYPE, ASM)
                else:
                    b_minus, b_scale = None, None
                    if zeros_ptr is not None:
                        b_minus = tl.expand_dims(minus_zeros(zeros[0 if IS_CHANNEL else part], DTYPE), -1)
                    if SCALED:
                        b_scale = tl.expand_dims(scales[part].to(DTYPE), -1)
                    b_low, b_high = unpack_4_bits(b_codes, b_minus, b_scale, DTYPE, ASM)
                b_part = product(b_low, b_x, b_part, SLICES)
                b_x = load_x(p_x + o_column + WIDTH, m_x, o_column + WIDTH, K, STEP)
                b_part = product(b_high, b_x, b_part, SLICES)
            else:
                b_codes = load_columns(p_codes, o_byte, K, STEP, EVICTION)
                b_part = product(unpack_8_bits(b_codes, KIND, DTYPE, ASM), b_x, b_part, SLICES)
            if HAS_SUMS:
                b_acc += b_part * tl.expand_dims(scales[part].to(tl.float32), -1)
            else:
                b_acc = b_part
        if WAITS and ASM:
            b_acc = finished(b_acc)
        if HAS_GROUPS:
            scales, zeros = next_scales, next_zeros
    if SLICES > 1:
        b_acc = tl.sum(b_acc, 0)
    if IS_CHANNEL:
        b_acc *= tl.expand_dims(scales[0].to(tl.float32), 1)  # type: ignore[misc]
    o_to = (o_place if GATED else o_pair).to(tl.int64)
    store_tile(b_acc, load_bias(bias_ptr, o_n), out_ptr, i_p, o_to, m_m, N, GATED, ACTIVATION)


@triton.jit
def _group(o_span, SPAN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """The group of a span, the last one for spans beyond the row."""
    o_group = o_span if SPAN == GROUP else o_span * SPAN // GROUP
    return o_group if IS_WHOLE else tl.minimum(o_group, GROUPS - 1)
