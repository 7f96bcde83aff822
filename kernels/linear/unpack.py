"""Device functions that turn codes of weights into floats of 16 bits.

In registers four bytes at a time: a code is put into the mantissa of a float whose exponent makes it an integer, and
what the exponent adds is taken away. That is exact, and half of what conversions one by one would cost. Bits of an
8-bit float move to their places, and a power of two mends the exponent.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of two 16-bit floats: their name, 1.0, the exponent that makes a code an integer, and what it adds to a 4-bit code.
_BF16 = ("bf16", 0x3F803F80, 0x43434343, 0xC308C308)  # 128 + code - 136
_FP16 = ("f16", 0x3C003C00, 0x64646464, 0xE408E408)  # 1024 + code - 1032


def _four_bits(kind: str, one: int, magic: int, minus: int, *, zeros: bool, scaled: bool) -> tl.constexpr:
    """Assembly for four bytes: floats of their low halves, then of the high ones.

    With ``zeros`` operands behind the bytes say what is added, and with ``scaled`` those behind them are the scales.
    """
    lines = ["{ .reg .b32 lo, hi, one, minus, none;", "and.b32 lo, $4, 0x0F0F0F0F; shr.u32 hi, $4, 4;"]
    lines.append(f"and.b32 hi, hi, 0x0F0F0F0F; mov.b32 one, {one:#x}; mov.b32 minus, {minus:#x};")
    lines.append("mov.b32 none, 0x80008000;")
    for number, (half, places) in enumerate((("lo", 0x4140), ("lo", 0x4342), ("hi", 0x4140), ("hi", 0x4342))):
        addend, scale = f"${5 + number % 2}" if zeros else "minus", f"${5 + 2 * zeros + number % 2}"
        lines.append(f"prmt.b32 ${number}, {half}, {magic:#x}, {places:#x};")
        lines.append(f"fma.rn.{kind}x2 ${number}, ${number}, one, {addend};")
        if scaled:
            lines.append(f"fma.rn.{kind}x2 ${number}, ${number}, {scale}, none;")
    return tl.constexpr("\n".join([*lines, "}"]))


POWER_126 = tl.constexpr(2.0**126)  # of a 4-bit float whose bits stand in their places in float32
FOUR_BITS_BF16, FOUR_BITS_FP16 = (_four_bits(*of, zeros=False, scaled=False) for of in (_BF16, _FP16))
ZEROS_BF16, ZEROS_FP16 = (_four_bits(*of, zeros=True, scaled=False) for of in (_BF16, _FP16))
SCALED_BF16, SCALED_FP16 = (_four_bits(*of, zeros=False, scaled=True) for of in (_BF16, _FP16))
BOTH_BF16, BOTH_FP16 = (_four_bits(*of, zeros=True, scaled=True) for of in (_BF16, _FP16))
_NO_OPERAND, _ONE_OPERAND, _TWO_OPERANDS = (  # behind the bytes; each is two registers of two floats
    tl.constexpr("=r,=r,=r,=r,r" + more) for more in ("", ",r,r", ",r,r,r,r")
)
_BF16_PAIR, _FP16_PAIR = tl.constexpr((tl.bfloat16, tl.bfloat16)), tl.constexpr((tl.float16, tl.float16))

# The sign bit lies where bf16's exponent ends: 128 + its low seven bits, less 128 or 256.
EIGHT_BITS_BF16 = tl.constexpr("""{ .reg .b32 a, b, minus;
mov.b32 minus, 0xBF80BF80;
prmt.b32 a, $2, 0x43434343, 0x4140; and.b32 b, a, 0xFF80FF80; and.b32 a, a, 0xFF7FFF7F;
fma.rn.bf16x2 $0, b, minus, a;
prmt.b32 a, $2, 0x43434343, 0x4342; and.b32 b, a, 0xFF80FF80; and.b32 a, a, 0xFF7FFF7F;
fma.rn.bf16x2 $1, b, minus, a; }""")
EIGHT_BITS_FP16 = tl.constexpr("""{ .reg .b32 a, one, minus;
xor.b32 a, $2, 0x80808080; mov.b32 one, 0x3C003C00; mov.b32 minus, 0xE480E480;
prmt.b32 $0, a, 0x64646464, 0x4140; fma.rn.f16x2 $0, $0, one, minus;
prmt.b32 $1, a, 0x64646464, 0x4342; fma.rn.f16x2 $1, $1, one, minus; }""")


def _float8(kind: str, shift: int, mask: int, factor: int) -> tl.constexpr:
    """Assembly for four bytes: sign, exponent and mantissa in their places, times a power of two.

    The power mends subnormal numbers, too.
    """
    lines = [f"{{ .reg .b32 a, b, factor, none; mov.b32 factor, {factor:#x}; mov.b32 none, 0x80008000;"]
    for number, places in enumerate((0x1404, 0x3424)):
        lines.append(f"prmt.b32 a, $2, 0, {places:#x}; shr.u32 b, a, {shift}; and.b32 b, b, {mask:#x};")
        lines.append(f"and.b32 a, a, 0x80008000; or.b32 a, a, b; fma.rn.{kind}x2 ${number}, a, factor, none;")
    return tl.constexpr("\n".join([*lines, "}"]))


def _float4(kind: str, low: str, high: str) -> tl.constexpr:
    """Assembly for four bytes: floats of their low halves, then of the high ones.

    ``low`` and ``high`` bring sign, exponent and mantissa to their places in r, from a byte that stands in either half
    of the 16 bits of p, its copy in the lower half a bit to the left of its place. Operands behind the bytes multiply
    them, a pair of floats for each byte: first of the low halves, then of the high ones. Two neighbours are of one row
    and have equal factors; the next two may be of another row, as operands of tensor cores lie.
    """
    lines = ["{ .reg .b32 w, p, t, u, r, none; mov.b32 none, 0x80008000; shl.b32 w, $4, 1;"]
    for number, places in enumerate((0x1504, 0x3726)):
        lines.append(f"prmt.b32 p, $4, w, {places:#x};")
        lines.append(f"{low} fma.rn.{kind}x2 ${number}, r, ${5 + 2 * number}, none;")
        lines.append(f"{high} fma.rn.{kind}x2 ${number + 2}, r, ${9 + 2 * number}, none;")
    return tl.constexpr("\n".join([*lines, "}"]))


FLOAT4_BF16 = _float4(
    "bf16",
    "and.b32 t, p, 0x003C003C; mul.lo.u32 t, t, 0x0410; and.b32 r, t, 0x81C081C0;",
    "and.b32 r, p, 0x81C081C0;",
)
FLOAT4_FP16 = _float4(
    "f16",
    "shl.b32 t, p, 3; and.b32 u, t, 0x80008000; and.b32 r, p, 0x0E000E00; or.b32 r, r, u;",
    "and.b32 r, p, 0x80008000; and.b32 t, t, 0x08000800; or.b32 r, r, t;"
    "shr.u32 t, p, 4; and.b32 t, t, 0x06000600; or.b32 r, r, t;",
)
_TWO_FACTORS = tl.constexpr("=r,=r,=r,=r,r" + 8 * ",r")  # behind the bytes; each is four registers of two floats
FLOAT8_BF16 = _float8("bf16", 4, 0x07F007F0, 0x7B807B80)  # 2^120
FLOAT8_FP16 = _float8("f16", 1, 0x3F803F80, 0x5C005C00)  # 2^8


@triton.jit
def unpack_8_bits(b_codes, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Floats of ``DTYPE`` of 8-bit codes, given as bytes."""
    if not ASM:
        SOURCE: tl.constexpr = tl.int8 if KIND == "int8" else tl.float8e4nv
        return b_codes.to(SOURCE, bitcast=True).to(tl.float32).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        BF16: tl.constexpr = EIGHT_BITS_BF16 if KIND == "int8" else FLOAT8_BF16
        return tl.inline_asm_elementwise(BF16, "=r,=r,r", [b_codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        FP16: tl.constexpr = EIGHT_BITS_FP16 if KIND == "int8" else FLOAT8_FP16
        return tl.inline_asm_elementwise(FP16, "=r,=r,r", [b_codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def unpack_4_bits(b_codes, b_minus, b_scale, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Floats of ``DTYPE`` of the low and of the high halves of bytes, less their zeros, and scaled where there is one.

    ``b_minus``: from ``minus_zeros``; None: 8 is zero. It and ``b_scale`` have one column, and the scale that dtype.
    """
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if not ASM:
        SHIFT: tl.constexpr = 128.0 if IS_BF16 else 1024.0
        b_add = -8.0 if b_minus is None else b_minus.to(tl.float32) + SHIFT
        b_low, b_high = (b_codes & 15).to(tl.float32) + b_add, (b_codes >> 4).to(tl.float32) + b_add
        if b_scale is not None:
            b_low, b_high = b_low * b_scale.to(tl.float32), b_high * b_scale.to(tl.float32)
        return b_low.to(DTYPE), b_high.to(DTYPE)
    elif b_minus is None and b_scale is None:
        return _call(FOUR_BITS_BF16, FOUR_BITS_FP16, _NO_OPERAND, [b_codes], IS_BF16)
    elif b_scale is None:
        return _call(ZEROS_BF16, ZEROS_FP16, _ONE_OPERAND, [b_codes, b_minus], IS_BF16)
    elif b_minus is None:
        return _call(SCALED_BF16, SCALED_FP16, _ONE_OPERAND, [b_codes, b_scale], IS_BF16)
    else:
        return _call(BOTH_BF16, BOTH_FP16, _TWO_OPERANDS, [b_codes, b_minus, b_scale], IS_BF16)


@triton.jit
def unpack_float4(b_codes, b_low, b_high, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Floats of ``DTYPE`` of the low and of the high halves of packed bytes of 4-bit floats, scaled.

    ``b_low``, ``b_high``: exponents of their scales, int32 of one column, up to ``MAX_EXPONENT``.
    """
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if ASM:
        operands = [b_codes, _float4_factors(b_low, IS_BF16), _float4_factors(b_high, IS_BF16)]
        return _call(FLOAT4_BF16, FLOAT4_FP16, _TWO_FACTORS, operands, IS_BF16)
    else:
        b_low_codes = (b_codes >> 1) & 15
        b_high_codes = ((b_codes >> 4) & 8) | ((b_codes & 1) << 2) | ((b_codes >> 5) & 3)
        return _scaled_float4(b_low_codes, b_low).to(DTYPE), _scaled_float4(b_high_codes, b_high).to(DTYPE)


@triton.jit
def _float4_factors(b_exponents, IS_BF16: tl.constexpr):
    """Pairs of equal 16-bit floats, as int32, that make numbers of 4-bit floats' bits in their places.

    Those are 2^-126 of the numbers in bfloat16, and 2^-14 in float16, where small powers are rounded to nothing.
    """
    if IS_BF16:
        return b_exponents * 0x00800080 + 0x3F003F00
    else:
        b_factors = ((b_exponents + 14) << 23).to(tl.float32, bitcast=True).to(tl.float16)
        return b_factors.to(tl.int16, bitcast=True).to(tl.int32) * 0x00010001


@triton.jit
def _scaled_float4(b_codes, b_exponents):
    """Float32 of 4-bit floats times powers of two."""
    b_wide = b_codes.to(tl.int32)
    b_bits = ((b_wide & 8) << 28) | ((b_wide & 7) << 22)
    b_power = tl.maximum(b_exponents << 23, 0x400000)  # 2^-127 has no exponent of its own
    return b_bits.to(tl.float32, bitcast=True) * POWER_126 * b_power.to(tl.float32, bitcast=True)


@triton.jit
def _call(BF16: tl.constexpr, FP16: tl.constexpr, REGISTERS: tl.constexpr, operands, IS_BF16: tl.constexpr):
    """The results of assembly for one dtype or the other: the low halves' floats and the high ones'."""
    if IS_BF16:
        return tl.inline_asm_elementwise(BF16, REGISTERS, operands, _BF16_PAIR, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(FP16, REGISTERS, operands, _FP16_PAIR, is_pure=True, pack=4)


@triton.jit
def minus_zeros(b_zeros, DTYPE: tl.constexpr):
    """What ``unpack_4_bits`` adds for codes that mean zero."""
    SHIFT: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
    return (-SHIFT - b_zeros.to(tl.float32)).to(DTYPE)
