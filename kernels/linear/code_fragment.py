"""Products of few rows with quantized weights in Triton, by tensor cores' instructions on registers as they are loaded.

A thread loads vectors of 16 bytes of two rows of the weight and of rows of ``x``, and these are what ``mma.m16n8k16``
wants of it: columns of a step are in an order of their own, the same one on both sides. Nothing passes through shared
memory but the sums of warps, each of which has columns of its own. The weight is asked for before ``x`` is waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous
from ..product_parts import swiglu_tile
from .unpack import (
    EIGHT_BITS_BF16,
    EIGHT_BITS_FP16,
    FOUR_BITS_BF16,
    FOUR_BITS_FP16,
    ZEROS_BF16,
    ZEROS_FP16,
    minus_zeros,
)


def _four_products(kind: str) -> tl.constexpr:
    """Assembly that adds four products of 16 columns: operands are sums, four of each register of A, and x twice."""
    lines = ["{ .reg .f32 a, b, c, d; mov.f32 a, $4; mov.f32 b, $5; mov.f32 c, $6; mov.f32 d, $7;"]
    for q in range(4):
        weight = ", ".join(f"${8 + 4 * register + q}" for register in range(4))
        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{a, b, c, d}}, {{{weight}}},")
        lines.append(f"{{${24 + 2 * q}, ${25 + 2 * q}}}, {{a, b, c, d}};")
    return tl.constexpr("\n".join([*lines, "mov.f32 $0, a; mov.f32 $1, b; mov.f32 $2, c; mov.f32 $3, d; }"]))


PRODUCTS_BF16, PRODUCTS_FP16 = _four_products("bf16"), _four_products("f16")
_OPERANDS = tl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 24))
_TWO_WORDS, _FOUR_WORDS = tl.constexpr((tl.int32, tl.int32)), tl.constexpr((tl.int32, tl.int32, tl.int32, tl.int32))


@triton.jit(do_not_specialize=["M"])
def code_fragment_kernel(
    x_words_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, N, M,
    K: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr,
    GATED: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, X_TILES: tl.constexpr, AHEAD: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, or with GATED its SwiGLU.

    A program takes TILES times 16 rows of the weight, with GATED half of them a gate's and half its up's, and X_TILES
    times 8 rows of ``x``. A step of a warp takes 64 bytes of each row, AHEAD steps are under way.

    Shapes:  x_words [M, K / 2];  words [N, words];  scales, zeros [N, cdiv(K, GROUP)];  bias [N] or None
             out [M, N], with GATED [M, N / 2]
    Grid:    (cdiv(N, 16 TILES), cdiv(M, 8 X_TILES))
    """
    let_next_start(OVERLAP)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    IS_INT4: tl.constexpr = KIND == "int4"
    STEP: tl.constexpr = 128 if IS_INT4 else 64  # columns
    NUMBER: tl.constexpr = K // STEP
    PART: tl.constexpr = (NUMBER + WARPS - 1) // WARPS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    IS_CHANNEL: tl.constexpr = GROUPS == 1
    GATES: tl.constexpr = TILES // 2 if GATED else TILES
    o_t, o_c = tl.arange(0, 32 * WARPS), tl.arange(0, 4)
    o_warp, o_g, o_q = o_t // 32, o_t % 32 // 4, o_t % 4
    first = tl.program_id(0).to(tl.int64) * (16 * GATES)
    o_vector = (o_q * 4)[:, None] + o_c[None, :]

    rows = ()  # two of each tile
    for tile in tl.static_range(TILES):
        o_n = first + tile % GATES * 16 + o_g
        half = tile // GATES * (N // 2)
        last = N // 2 - 1 if GATED else N - 1
        rows += (half + tl.minimum(o_n, last), half + tl.minimum(o_n + 8, last))  # type: ignore[assignment]
    codes = _load_codes(words_ptr, rows, 0, o_warp, o_vector, WARPS, AHEAD, NUMBER)
    SCALED: tl.constexpr = 1 if IS_CHANNEL else AHEAD  # steps that have scales of their own
    scales = _load_of_groups(scales_ptr, rows, 0, o_warp, WARPS, SCALED, NUMBER, STEP, GROUP, GROUPS)
    zeros = _load_of_groups(zeros_ptr, rows, 0, o_warp, WARPS, SCALED, NUMBER, STEP, GROUP, GROUPS)
    wait_for_previous(OVERLAP)

    o_m = tl.program_id(1) * (8 * X_TILES) + o_g
    p_x = ()
    sums = ()
    for j in tl.static_range(X_TILES):
        o_row = tl.minimum(o_m + 8 * j, M - 1).to(tl.int64) * (K // 2)
        p_x += (x_words_ptr + (o_row + o_q * 8)[:, None] + o_c[None, :],)  # type: ignore[assignment]
    for _ in tl.static_range(TILES * X_TILES):
        sums += (tl.zeros([32 * WARPS, 4], tl.float32),)  # type: ignore[assignment]
    if PART == AHEAD:
        sums = _add_block(
            sums, codes, scales, zeros, p_x, 0, o_warp, o_c,
            WARPS, TILES, X_TILES, AHEAD, NUMBER, STEP, IS_CHANNEL, DTYPE, IS_INT4, ASM,
        )  # fmt: skip
    else:
        for i in tl.range(0, PART, AHEAD, num_stages=1):
            codes_now, scales_now, zeros_now = codes, scales, zeros
            codes = _load_codes(words_ptr, rows, i + AHEAD, o_warp, o_vector, WARPS, AHEAD, NUMBER)
            if not IS_CHANNEL:
                scales = _load_of_groups(scales_ptr, rows, i + AHEAD, o_warp, WARPS, AHEAD, NUMBER, STEP, GROUP, GROUPS)
                zeros = _load_of_groups(zeros_ptr, rows, i + AHEAD, o_warp, WARPS, AHEAD, NUMBER, STEP, GROUP, GROUPS)
            sums = _add_block(
                sums, codes_now, scales_now, zeros_now, p_x, i, o_warp, o_c,
                WARPS, TILES, X_TILES, AHEAD, NUMBER, STEP, IS_CHANNEL, DTYPE, IS_INT4, ASM,
            )  # fmt: skip

    o_e = tl.arange(0, 128)  # what lanes of a warp hold, one after another
    o_row, o_x = o_e // 16 + o_e % 4 // 2 * 8, o_e % 16 // 4 * 2 + o_e % 2
    width = N // 2 if GATED else N
    for tile in tl.static_range(GATES):
        o_n = first + tile * 16 + o_row
        for j in tl.static_range(X_TILES):
            b_out = _finish(sums, scales, tile, j, bias_ptr, o_n, N, o_c, WARPS, X_TILES, IS_CHANNEL, DTYPE)
            if GATED:
                o_up = o_n + N // 2
                b_up = _finish(sums, scales, tile + GATES, j, bias_ptr, o_up, N, o_c, WARPS, X_TILES, IS_CHANNEL, DTYPE)
                b_out = swiglu_tile(b_out, b_up)
            o_out = (tl.program_id(1) * (8 * X_TILES) + 8 * j + o_x).to(tl.int64)
            tl.store(out_ptr + o_out * width + o_n, b_out, mask=(o_out < M) & (o_n < width))


@triton.jit
def _load_codes(words_ptr, rows, i, o_warp, o_vector, WARPS: tl.constexpr, STEPS: tl.constexpr, NUMBER: tl.constexpr):
    """Four words of each of ``rows`` for STEPS steps from ``i`` on; the last step again beyond it."""
    codes = ()
    for step in tl.static_range(STEPS):
        o_step = tl.minimum((i + step) * WARPS + o_warp, NUMBER - 1)
        for number in tl.static_range(len(rows)):
            p = words_ptr + ((rows[number] * NUMBER + o_step) * 16)[:, None] + o_vector
            codes += (tl.load(p, eviction_policy="evict_first"),)  # type: ignore[assignment]
    return codes


@triton.jit
def _load_of_groups(
    ptr, rows, i, o_warp, WARPS: tl.constexpr, STEPS: tl.constexpr, NUMBER: tl.constexpr, STEP: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [T, 1] of ``rows`` for the same steps; none without a pointer."""
    found = ()
    if ptr is not None:
        for step in tl.static_range(STEPS):
            o_group = tl.minimum((i + step) * WARPS + o_warp, NUMBER - 1) * STEP // GROUP
            for number in tl.static_range(len(rows)):
                found += (tl.load(ptr + rows[number] * GROUPS + o_group)[:, None],)  # type: ignore[assignment]
    return found


@triton.jit
def _add_block(
    sums, codes, scales, zeros, p_x, i, o_warp, o_c,
    WARPS: tl.constexpr, TILES: tl.constexpr, X_TILES: tl.constexpr, STEPS: tl.constexpr, NUMBER: tl.constexpr,
    STEP: tl.constexpr, IS_CHANNEL: tl.constexpr, DTYPE: tl.constexpr, IS_INT4: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``sums`` of TILES x X_TILES tiles with the products of STEPS steps from ``i`` on added."""
    for step in tl.static_range(STEPS):
        o_step = (i + step) * WARPS + o_warp
        m_x = None if NUMBER % (WARPS * STEPS) == 0 else (o_step < NUMBER)[:, None]
        x_low, x_high = (), ()
        for j in tl.static_range(X_TILES):
            p = p_x[j] + (o_step * (STEP // 2))[:, None]
            x_low += (_load_x(p, m_x),)  # type: ignore[assignment]
            if IS_INT4:
                x_high += (_load_x(p + 32, m_x),)  # type: ignore[assignment]
        news = ()
        for tile in tl.static_range(TILES):
            b_low, b_high = _pair(codes, step * TILES + tile)
            if not IS_INT4:
                l_0, l_2 = _unpack_8(b_low, DTYPE, ASM)
                l_1, l_3 = _unpack_8(b_high, DTYPE, ASM)
            elif len(zeros) == 0:
                l_0, l_2, l_4, l_6 = _unpack_4(b_low, None, DTYPE, ASM)
                l_1, l_3, l_5, l_7 = _unpack_4(b_high, None, DTYPE, ASM)
            else:
                z_low, z_high = _pair(zeros, tile if IS_CHANNEL else step * TILES + tile)
                l_0, l_2, l_4, l_6 = _unpack_4(b_low, z_low, DTYPE, ASM)
                l_1, l_3, l_5, l_7 = _unpack_4(b_high, z_high, DTYPE, ASM)
            for j in tl.static_range(X_TILES):
                b_sum = sums[tile * X_TILES + j]
                b_part = b_sum if IS_CHANNEL else tl.zeros_like(b_sum)
                b_part = _multiply(b_part, l_0, l_1, l_2, l_3, x_low[j], WARPS, DTYPE, ASM)
                if IS_INT4:
                    b_part = _multiply(b_part, l_4, l_5, l_6, l_7, x_high[j], WARPS, DTYPE, ASM)
                if not IS_CHANNEL:
                    s_low, s_high = _pair(scales, step * TILES + tile)
                    b_part = b_sum + b_part * _of_rows(s_low, s_high, o_c)
                news += (b_part,)  # type: ignore[assignment]
        sums = news
    return sums


@triton.jit
def _pair(tensors, number: tl.constexpr):
    """The two of a tile."""
    return tensors[2 * number], tensors[2 * number + 1]


@triton.jit
def _load_x(p, m_x):
    """Eight words of a row, four at a time."""
    other = None if m_x is None else 0
    return tl.load(p, mask=m_x, other=other), tl.load(p + 4, mask=m_x, other=other)


@triton.jit
def _of_rows(b_low, b_high, o_c):
    """A tile's scales [T, 4]: two sums of a thread are of its first row, two of its second."""
    return tl.where((o_c < 2)[None, :], b_low.to(tl.float32), b_high.to(tl.float32))


@triton.jit
def _unpack_4(b_words, b_zeros, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Pairs of floats in words: of low halves the first two and the last two, then of high halves."""
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if not ASM:
        SHIFT: tl.constexpr = 128.0 if IS_BF16 else 1024.0
        b_add = -8.0 if b_zeros is None else minus_zeros(b_zeros, DTYPE).to(tl.float32) + SHIFT
        return (
            _pair_of(b_words & 15, b_words >> 8 & 15, b_add, DTYPE),
            _pair_of(b_words >> 16 & 15, b_words >> 24 & 15, b_add, DTYPE),
            _pair_of(b_words >> 4 & 15, b_words >> 12 & 15, b_add, DTYPE),
            _pair_of(b_words >> 20 & 15, b_words >> 28 & 15, b_add, DTYPE),
        )
    elif b_zeros is None:
        TEXT: tl.constexpr = FOUR_BITS_BF16 if IS_BF16 else FOUR_BITS_FP16
        return tl.inline_asm_elementwise(TEXT, "=r,=r,=r,=r,r", [b_words], _FOUR_WORDS, is_pure=True, pack=1)
    else:
        ZEROS: tl.constexpr = ZEROS_BF16 if IS_BF16 else ZEROS_FP16
        b_minus = minus_zeros(b_zeros, DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        operands = [b_words, b_minus | (b_minus << 16), b_minus | (b_minus << 16)]
        return tl.inline_asm_elementwise(ZEROS, "=r,=r,=r,=r,r,r,r", operands, _FOUR_WORDS, is_pure=True, pack=1)


@triton.jit
def _unpack_8(b_words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Pairs of floats in words: the first two of a word and the last two."""
    if ASM:
        TEXT: tl.constexpr = EIGHT_BITS_BF16 if tl.bfloat16 == DTYPE else EIGHT_BITS_FP16
        return tl.inline_asm_elementwise(TEXT, "=r,=r,r", [b_words], _TWO_WORDS, is_pure=True, pack=1)
    else:
        return (
            _pair_of(b_words << 24 >> 24, b_words << 16 >> 24, 0.0, DTYPE),
            _pair_of(b_words << 8 >> 24, b_words >> 24, 0.0, DTYPE),
        )


@triton.jit
def _pair_of(b_0, b_1, b_add, DTYPE: tl.constexpr):
    """Two floats in a word."""
    b_0 = (b_0.to(tl.float32) + b_add).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    b_1 = (b_1.to(tl.float32) + b_add).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    return b_0 & 0xFFFF | (b_1 << 16)


@triton.jit
def _multiply(b_sum, a_0, a_1, a_2, a_3, b_x, WARPS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Adds products of 64 columns: words of the weight's first row, of its second, of each again, and of x."""
    if ASM:
        TEXT: tl.constexpr = PRODUCTS_BF16 if tl.bfloat16 == DTYPE else PRODUCTS_FP16
        operands = [b_sum, a_0, a_1, a_2, a_3, b_x[0], b_x[1]]
        return tl.inline_asm_elementwise(TEXT, _OPERANDS, operands, dtype=tl.float32, is_pure=True, pack=4)
    else:
        b_words = tl.join(b_x[0], b_x[1])  # [T, 4, 2]
        b_words = tl.reshape(
            tl.permute(b_words, (0, 2, 1)), [WARPS, 1, 8, 4, 4, 2]
        )  # warp, -, row, lane, product, word
        b_low = tl.reshape(tl.join(a_0, a_2), [WARPS, 8, 1, 4, 4, 2])
        b_high = tl.reshape(tl.join(a_1, a_3), [WARPS, 8, 1, 4, 4, 2])
        b_low, b_high = _sum_of_words(b_low, b_words, WARPS, DTYPE), _sum_of_words(b_high, b_words, WARPS, DTYPE)
        b_all = tl.join(tl.reshape(b_low, [WARPS * 32, 2]), tl.reshape(b_high, [WARPS * 32, 2]))
        return b_sum + tl.reshape(tl.permute(b_all, (0, 2, 1)), [WARPS * 32, 4])


@triton.jit
def _sum_of_words(b_a, b_b, WARPS: tl.constexpr, DTYPE: tl.constexpr):
    """Sums [WARPS, 8, 8] of products of pairs in words."""
    b_product = _half(b_a, 0, DTYPE) * _half(b_b, 0, DTYPE) + _half(b_a, 1, DTYPE) * _half(b_b, 1, DTYPE)
    return tl.sum(tl.reshape(b_product, [WARPS, 8, 8, 32]), 3)


@triton.jit
def _half(b_words, NUMBER: tl.constexpr, DTYPE: tl.constexpr):
    return (b_words >> (16 * NUMBER)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _finish(
    sums, scales, tile: tl.constexpr, j: tl.constexpr, bias_ptr, o_n, N, o_c,
    WARPS: tl.constexpr, X_TILES: tl.constexpr, IS_CHANNEL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile's sums of all warps and the bias, rounded [128]."""
    b_sum = sums[tile * X_TILES + j]
    if IS_CHANNEL:
        s_low, s_high = _pair(scales, tile)
        b_sum *= _of_rows(s_low, s_high, o_c)
    b_out = tl.sum(tl.reshape(b_sum, [WARPS, 128]), 0)
    if bias_ptr is not None:
        b_out += tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    return b_out.to(DTYPE)
