"""A quantized weight written out as a matrix of 16 bits, for products of so many rows that torch's own are fastest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from .packed import PackedCodes
from .unpack import minus_zeros, unpack_4_bits, unpack_8_bits, unpack_float4

BYTES = 4096  # of codes, a program
NUM_WARPS = 4


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, N,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = (codes - zeros) * scales``, columns in the order of the codes; 4-bit floats have words of 4 exponents.

    Shapes:  codes [N, bytes];  scales, zeros [N, GROUPS];  out [N, K]
    Grid:    (cdiv(N, ROWS) * spans of a row,)
    """
    let_next_start(OVERLAP)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    HALVES: tl.constexpr = KIND == "int4" or KIND == "float4"
    WIDTH: tl.constexpr = SPAN // 2 if HALVES else SPAN
    PAIRED: tl.constexpr = 2 if KIND == "float4" else 1
    NUMBER: tl.constexpr = (K + SPAN * PAIRED - 1) // (SPAN * PAIRED) * PAIRED
    span, o_k = tl.program_id(0) % NUMBER, tl.arange(0, WIDTH)
    o_n = (tl.program_id(0) // NUMBER).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_n = o_n < N
    o_n = tl.minimum(o_n, N - 1)
    p_out = out_ptr + o_n[:, None] * K + (span * SPAN + o_k)[None, :]
    m_low = m_n[:, None] & (span * SPAN + o_k < K)[None, :]
    if KIND == "float4":
        b_exponents = tl.load(scales_ptr + o_n * GROUPS + span // 2)[:, None] >> (span % 2 * 16)
    else:
        o_scale = (o_n // 128 if BLOCKS else o_n) * GROUPS + span * SPAN // GROUP
        b_scale = tl.load(scales_ptr + o_scale).to(tl.float32)[:, None]
    if HALVES:
        b_codes = tl.load(codes_ptr + o_n[:, None] * (NUMBER * WIDTH) + (span * WIDTH + o_k)[None, :])
        if KIND == "float4":
            b_low, b_high = unpack_float4(b_codes, b_exponents & 255, (b_exponents >> 8) & 255, DTYPE, ASM)
        else:
            b_minus = None
            if zeros_ptr is not None:
                b_minus = minus_zeros(tl.load(zeros_ptr + o_scale), DTYPE)[:, None]
            b_low, b_high = unpack_4_bits(b_codes, b_minus, None, DTYPE, ASM)
            b_low, b_high = (b_low.to(tl.float32) * b_scale).to(DTYPE), (b_high.to(tl.float32) * b_scale).to(DTYPE)
        m_high = m_n[:, None] & (span * SPAN + WIDTH + o_k < K)[None, :]
        wait_for_previous(OVERLAP)
        tl.store(p_out + WIDTH, b_high, mask=m_high)
    else:
        b_codes = tl.load(codes_ptr + o_n[:, None] * K + (span * SPAN + o_k)[None, :], mask=m_low, other=0)
        b_low = (unpack_8_bits(b_codes, KIND, DTYPE, ASM).to(tl.float32) * b_scale).to(DTYPE)
        wait_for_previous(OVERLAP)
    tl.store(p_out, b_low, mask=m_low)


def dequantize(packed: PackedCodes, dtype: torch.dtype) -> Tensor:
    """[O, I], columns in the order of the codes."""
    num_out, num_columns = packed.shape
    out = torch.empty(num_out, num_columns, dtype=dtype, device=packed.codes.device)
    constexprs = dequantize_constexprs(packed)
    grid = (triton.cdiv(num_out, constexprs["ROWS"]) * packed.num_spans,)
    operands = packed.codes.view(torch.uint8), *packed.group_operands(in_words=False), out, num_out
    overlap = overlap_options(out.device)
    dequantize_kernel[grid](*operands, **constexprs, num_warps=NUM_WARPS, **overlap, **FUSED)
    return out


def dequantize_constexprs(packed: PackedCodes) -> dict[str, object]:
    """Compile-time arguments."""
    width = packed.span * packed.bits // 8
    return packed.constexprs | {"ROWS": BYTES // width}
