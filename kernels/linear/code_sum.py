"""Product of one row with a quantized weight in Triton, by multiplication and addition in float32.

A program holds the codes of its rows of the weight in registers, all of them asked for before it waits for ``x``. A
code becomes the mantissa of a float; what the exponent adds is taken away from the sum of four or eight products.
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

from ..overlap import after_previous, let_next_start
from ..product_parts import load_bias, store_row, weight_rows

# Each assembly text takes four words of codes, which have one scale, and columns of x: those of the first byte of each
# word, then of the second and so on; of 4 bits for low halves, then for high ones. Result 0 is the sum of all products
# and the others are 0. Of 4 bits a low half becomes 128 + code, a high one 128 + code / 16, which multiplies 16 x. The
# last four operands, one a word, take away what the 128s and a zero of 8 add.


def _four_bits() -> str:
    lines = ["{ .reg .b32 exponent, t, v; .reg .f32 f, s; mov.b32 exponent, 0x43000000; mov.f32 s, $40;"]
    lines.append("add.f32 s, s, $41; add.f32 s, s, $42; add.f32 s, s, $43;")
    for word in range(4):
        for shift, low, high in ((16, 0, None), (8, 1, 4), (0, 2, 5), (-8, 3, 6), (-16, None, 7)):
            move = f"shl.b32 t, ${4 + word}, {shift};" if shift > 0 else f"shr.u32 t, ${4 + word}, {-shift};"
            lines.append(move if shift else f"mov.b32 t, ${4 + word};")
            for mask, column in ((0x000F0000, low), (0x0000F000, high)):
                if column is not None:
                    lines.append(f"lop3.b32 v, t, {mask:#x}, exponent, 0xEA; mov.b32 f, v;")
                    lines.append(f"fma.rn.f32 s, f, ${8 + 4 * column + word}, s;")
    return "\n".join([*lines, _SUM])


def _eight_bits() -> str:
    lines = ["{ .reg .b32 u, v; .reg .f32 f, s; mov.f32 s, 0f00000000;"]
    for word in range(4):
        lines.append(f"xor.b32 u, ${4 + word}, 0x80808080;")
        for column in range(4):
            lines.append(f"prmt.b32 v, u, 0x4B000000, {0x7650 + column:#x}; mov.b32 f, v;")
            lines.append(f"sub.f32 f, f, 0f4B000080; fma.rn.f32 s, f, ${8 + 4 * column + word}, s;")
    return "\n".join([*lines, _SUM])


def _float8() -> str:
    lines = ["{ .reg .b32 v; .reg .f32 f, s; mov.f32 s, 0f00000000;"]
    for word, column in itertools.product(range(4), range(4)):
        lines.append(f"shl.b32 v, ${4 + word}, {24 - 8 * column}; shr.s32 v, v, 4; and.b32 v, v, 0x87F00000;")
        lines.append(f"mov.b32 f, v; fma.rn.f32 s, f, ${8 + 4 * column + word}, s;")
    return "\n".join([*lines, _SUM])


_SUM = "mov.f32 $0, s; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; }"
SUM_OF_INT4, SUM_OF_INT8, SUM_OF_FLOAT8 = (tl.constexpr(text()) for text in (_four_bits, _eight_bits, _float8))
FLOAT8_FACTOR = tl.constexpr(2.0**60)  # of x and of the sum: a float8's bits in their places are 2^-120 of its value
_OPERANDS_OF_8 = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 4 + ["f"] * 36))
_OPERANDS_OF_4 = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 4 + ["f"] * 16))
_FOUR_FLOATS = tl.constexpr((tl.float32, tl.float32, tl.float32, tl.float32))
_LOAD_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, t; ld.global.v2.b32 {a, b}, [$4];"
    "shl.b32 t, a, 16; mov.b32 $0, t; and.b32 t, a, 0xFFFF0000; mov.b32 $1, t;"
    "shl.b32 t, b, 16; mov.b32 $2, t; and.b32 t, b, 0xFFFF0000; mov.b32 $3, t; }"
)
_LOAD_FP16 = tl.constexpr(
    "{ .reg .b16 a, b, c, d; ld.global.v4.b16 {a, b, c, d}, [$4];"
    "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


@triton.jit
def code_sum_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, N,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr,
    BLOCKS: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = weight @ x + bias``, or with GATED its SwiGLU. A step takes BLOCK_Q vectors of four words of each row.

    Shapes:  x [K];  words int32 [N, words];  scales, zeros [N, GROUPS];  bias [N] or None
             out [N], with GATED [N / 2]
    Grid:    (cdiv(N, BLOCK_N),)
    """
    let_next_start(OVERLAP)
    IS_INT4: tl.constexpr = KIND == "int4"
    WIDTH: tl.constexpr = SPAN // 2 if IS_INT4 else SPAN  # bytes of a span
    NUMBER: tl.constexpr = (K + SPAN - 1) // SPAN
    VECTORS: tl.constexpr = NUMBER * WIDTH // 16 if IS_INT4 else K // 16
    PARTS: tl.constexpr = (VECTORS + BLOCK_Q - 1) // BLOCK_Q
    IS_CHANNEL: tl.constexpr = GROUPS == 1
    IS_WHOLE: tl.constexpr = VECTORS % BLOCK_Q == 0 and (K % SPAN == 0 or not IS_INT4)
    i_p, o_word = tl.program_id(0), tl.arange(0, 4)
    o_n = weight_rows(i_p, N, GATED, False, BLOCK_N)
    p_codes = words_ptr + (o_n * (VECTORS * 4))[None, :, None] + o_word[None, None, :]
    o_scale = (o_n // 128 if BLOCKS else o_n) * GROUPS
    codes, scales, zeros = (), (), ()
    for part in tl.static_range(PARTS):
        o_q = part * BLOCK_Q + tl.arange(0, BLOCK_Q)
        o_group = o_q * 16 // WIDTH * SPAN // GROUP if IS_INT4 else o_q * 16 // GROUP
        m_q = o_q < VECTORS
        p = p_codes + o_q[:, None, None] * 4
        if VECTORS % BLOCK_Q == 0:
            codes += (tl.load(p, eviction_policy="evict_first"),)  # type: ignore[assignment]
        else:
            codes += (tl.load(p, mask=m_q[:, None, None], other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        if not IS_CHANNEL:
            o = o_scale[None, :] + o_group[:, None]
            scales += (tl.load(scales_ptr + o, mask=m_q[:, None], other=0.0),)  # type: ignore[assignment]
            if zeros_ptr is not None:
                zeros += (tl.load(zeros_ptr + o, mask=m_q[:, None], other=0),)  # type: ignore[assignment]
    if IS_CHANNEL:
        b_scale = tl.load(scales_ptr + o_scale).to(tl.float32)
        if zeros_ptr is not None:
            b_zero = tl.load(zeros_ptr + o_scale).to(tl.float32)[None, :]
    b_bias = load_bias(bias_ptr, o_n)
    x_ptr = after_previous(x_ptr, OVERLAP)

    b_acc = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        o_byte = (part * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None, None] * 16 + o_word[None, None, :] * 4
        if IS_INT4:
            o_k = o_byte // WIDTH * SPAN + o_byte % WIDTH
            b_x, b_y = _load_four(x_ptr, o_k, K, IS_WHOLE, ASM), _load_four(x_ptr, o_k + WIDTH, K, IS_WHOLE, ASM)
            b_part = _product_of_8(codes[part], b_x, b_y, ASM)
            if zeros_ptr is not None:
                if not IS_CHANNEL:
                    b_zero = zeros[part].to(tl.float32)
                b_sum = b_x[0] + b_x[1] + b_x[2] + b_x[3] + (b_y[0] + b_y[1] + b_y[2] + b_y[3])
                b_part += (8.0 - b_zero) * tl.sum(b_sum, 2)
        else:
            b_part = _product_of_4(codes[part], _load_four(x_ptr, o_byte, K, IS_WHOLE, ASM), KIND, ASM)
        b_acc += b_part if IS_CHANNEL else b_part * scales[part].to(tl.float32)
    b_out = tl.sum(b_acc, 0)
    if IS_CHANNEL:
        b_out *= b_scale
    if KIND == "float8" and ASM:
        b_out *= FLOAT8_FACTOR
    store_row(b_out, b_bias, out_ptr, i_p, N, GATED)


@triton.jit
def _load_four(x_ptr, o_k, K: tl.constexpr, IS_WHOLE: tl.constexpr, ASM: tl.constexpr):
    """Float32 of ``x`` at ``o_k`` and the three columns behind, zeros beyond K.

    A vector of 8 bytes is loaded by the instruction that spreads it, in the layout of the codes.
    """
    p = x_ptr + (o_k if IS_WHOLE else tl.minimum(o_k, K - 4))
    if not ASM:
        b_0, b_1, b_2, b_3 = tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)
        b_0, b_1, b_2, b_3 = b_0.to(tl.float32), b_1.to(tl.float32), b_2.to(tl.float32), b_3.to(tl.float32)
    elif x_ptr.dtype.element_ty == tl.bfloat16:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            _LOAD_BF16, "=f,=f,=f,=f,l", [p.to(tl.int64)], _FOUR_FLOATS, is_pure=True, pack=1
        )
    else:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            _LOAD_FP16, "=f,=f,=f,=f,l", [p.to(tl.int64)], _FOUR_FLOATS, is_pure=True, pack=1
        )
    if IS_WHOLE:
        return b_0, b_1, b_2, b_3
    else:
        m = o_k < K
        return tl.where(m, b_0, 0.0), tl.where(m, b_1, 0.0), tl.where(m, b_2, 0.0), tl.where(m, b_3, 0.0)


@triton.jit
def _first_of_four(b):
    """[Q, N, 4] -> [Q, N]."""
    b = tl.reshape(b, [b.shape[0], b.shape[1], 2, 2])
    return tl.split(tl.split(b)[0])[0]


@triton.jit
def _product_of_8(b_codes, b_x, b_y, ASM: tl.constexpr):
    """Words [Q, N, 4] of 4-bit codes, of which 8 is zero, times their columns ``b_x`` and ``b_y``, summed: [Q, N]."""
    if ASM:
        b_minus = -136.0 * (b_x[0] + b_x[1] + b_x[2] + b_x[3]) - 2056.0 * (b_y[0] + b_y[1] + b_y[2] + b_y[3])
        y_0, y_1, y_2, y_3 = b_y[0] * 16.0, b_y[1] * 16.0, b_y[2] * 16.0, b_y[3] * 16.0
        operands = [b_codes, b_x[0], b_x[1], b_x[2], b_x[3], y_0, y_1, y_2, y_3, b_minus]
        b_sum = tl.inline_asm_elementwise(SUM_OF_INT4, _OPERANDS_OF_8, operands, dtype=tl.float32, is_pure=True, pack=4)
        return _first_of_four(b_sum)
    else:
        b_sum = tl.zeros(b_codes.shape, tl.float32)
        for byte in tl.static_range(4):
            b_sum += ((b_codes >> (8 * byte) & 15) - 8).to(tl.float32) * b_x[byte]
            b_sum += ((b_codes >> (8 * byte + 4) & 15) - 8).to(tl.float32) * b_y[byte]
        return tl.sum(b_sum, 2)


@triton.jit
def _product_of_4(b_codes, b_x, KIND: tl.constexpr, ASM: tl.constexpr):
    """Words [Q, N, 4] of 8-bit codes times their columns, summed: [Q, N]; of floats without ``FLOAT8_FACTOR``."""
    if ASM:
        FACTOR: tl.constexpr = FLOAT8_FACTOR if KIND == "float8" else 1.0
        TEXT: tl.constexpr = SUM_OF_FLOAT8 if KIND == "float8" else SUM_OF_INT8
        operands = [b_codes, b_x[0] * FACTOR, b_x[1] * FACTOR, b_x[2] * FACTOR, b_x[3] * FACTOR]
        b_sum = tl.inline_asm_elementwise(TEXT, _OPERANDS_OF_4, operands, dtype=tl.float32, is_pure=True, pack=4)
        return _first_of_four(b_sum)
    else:
        SOURCE: tl.constexpr = tl.float8e4nv if KIND == "float8" else tl.int8
        b_sum = tl.zeros(b_codes.shape, tl.float32)
        for byte in tl.static_range(4):
            b_byte = (b_codes >> (8 * byte) & 255).to(tl.uint8).to(SOURCE, bitcast=True)
            b_sum += b_byte.to(tl.float32) * b_x[byte]
        return tl.sum(b_sum, 2)
