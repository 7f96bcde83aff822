"""Products with quantized weights in Triton on tensor cores: codes become 16-bit floats in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..fusion import FUSED
from ..overlap import let_next_start, overlap_options, wait_for_previous
from ..product_parts import add_sums, load_bias, store_sums, store_tile, swiglu_tile, weight_rows
from .scales import load_groups, minus_of, scale_of, zeros_after
from .unpack import unpack_4_bits, unpack_8_bits

ADD_TILE = 1024  # sums of a program that adds splits
# Before Triton 3.9 a step may overwrite registers that tensor cores still read (triton-lang/triton#9433).
OVERWRITES = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)


@triton.jit(do_not_specialize=["M"])
def code_tile_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, N, M,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr,
    BLOCKS: tl.constexpr, GATED: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, WAITS: tl.constexpr,
    SPLITS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """``out = x @ weight.T + bias``, or with GATED its SwiGLU.

    A step takes SPANS spans of columns, which have one scale a row: their sums are scaled, or with SCALED the elements,
    which are then rounded. With SLICES each warp has columns of its own, with SPLITS each program, which then leaves
    sums for ``add_splits_kernel``. BLOCKS: the scales are those of 128 x 128 elements.

    Shapes:  x [M, K];  codes [N, bytes];  scales, zeros [N, GROUPS], if there are several in words;  bias [N] or None
             out [M, N], with GATED [M, N / 2], with SPLITS float32 [SPLITS, M, the grid's tiles BLOCK_N]
    Grid:    (cdiv(N, BLOCK_N), cdiv(M, BLOCK_M), SPLITS)
    """
    let_next_start(OVERLAP)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = SPAN // 2 if KIND == "int4" else SPAN  # bytes of a span
    NUMBER: tl.constexpr = (K + SPAN - 1) // SPAN
    PART: tl.constexpr = NUMBER // (SLICES * SPLITS)  # spans of a slice
    ROW: tl.constexpr = NUMBER * WIDTH if KIND == "int4" else K
    IS_CHANNEL: tl.constexpr = GROUPS == 1
    IN_WORDS: tl.constexpr = scales_ptr.dtype.element_ty == tl.int32
    SHARED: tl.constexpr = 2 if IN_WORDS and GROUP == SPAN and SPANS % 2 == 0 else 1  # spans that have a word together
    i_p = tl.program_id(0)
    o_n = weight_rows(i_p, N, GATED, FULL, BLOCK_N)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < M
    o_k = tl.arange(0, WIDTH)
    o_row = tl.minimum(o_m, M - 1).to(tl.int64) * K
    o_scale = o_n // 128 if BLOCKS else o_n
    first = tl.program_id(2) * (SLICES * PART)
    codes_ptr += first * WIDTH
    x_ptr += first * SPAN
    if SLICES == 1:
        o_code, o_x, m_x = o_n[:, None] * ROW + o_k[None, :], o_row[:, None] + o_k[None, :], m_m[:, None]
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        o_slice = tl.arange(0, SLICES) * PART
        o_code = (o_slice * WIDTH)[:, None, None] + (o_n[:, None] * ROW + o_k[None, :])[None, :, :]
        o_x = (o_slice * SPAN)[:, None, None] + (o_row[:, None] + o_k[None, :])[None, :, :]
        m_x = m_m[None, :, None]
        o_scale, first = o_scale[None, :], first + o_slice[:, None]
        b_acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    b_channel_minus = None
    if IS_CHANNEL:
        b_channel = tl.load(scales_ptr + o_scale).to(tl.float32)
        if zeros_ptr is not None:
            b_channel_minus = minus_of(tl.load(zeros_ptr + o_scale), 0, DTYPE)
    wait_for_previous(OVERLAP)

    for i in tl.range(0, PART, SPANS, num_stages=STAGES):
        for part in tl.static_range(SPANS):
            span = i + part
            b_part, b_factor = b_acc, None
            b_minus = b_channel_minus
            if not IS_CHANNEL:
                o_group = (first + span) * SPAN // GROUP
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
            p_codes, p_x = codes_ptr + o_code + span * WIDTH, x_ptr + o_x + span * SPAN
            o_column = (first + span) * SPAN + o_k
            b_x = load_x(p_x, m_x, o_column, K, SPAN)
            if KIND == "int4":
                b_codes = tl.load(p_codes, eviction_policy="evict_first")
                b_low, b_high = unpack_4_bits(b_codes, b_minus, b_factor, DTYPE, ASM)
                b_part = product(b_low, b_x, b_part, SLICES)
                b_x = load_x(p_x + WIDTH, m_x, o_column + WIDTH, K, SPAN)
                b_part = product(b_high, b_x, b_part, SLICES)
            else:
                m_codes = None if K % SPAN == 0 else o_column < K
                b_codes = tl.load(p_codes, mask=m_codes, eviction_policy="evict_first")
                b_part = product(unpack_8_bits(b_codes, KIND, DTYPE, ASM), b_x, b_part, SLICES)
            if IS_CHANNEL or SCALED:
                b_acc = b_part
            else:
                b_acc += b_part * b_scale
        if WAITS and ASM:
            b_acc = finished(b_acc)
    if SLICES > 1:
        b_acc = tl.sum(b_acc, 0)
    if IS_CHANNEL:
        b_acc *= tl.reshape(b_channel, [BLOCK_N, 1])
    if SPLITS > 1:
        store_sums(b_acc, out_ptr, i_p, tl.num_programs(0), o_m, m_m, M)
    else:
        store_tile(b_acc, load_bias(bias_ptr, o_n), out_ptr, i_p, o_m.to(tl.int64), m_m, N, GATED)


@triton.jit
def add_splits_kernel(
    sums_ptr, bias_ptr, out_ptr, SIZE, NUM_OUT, first,
    N: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The sum of ``sums``, and of ``bias``, or with GATED its SwiGLU: NUM_OUT columns of ``out`` from ``first`` on.

    Shapes:  sums float32 [SPLITS, M, WIDTH], of SIZE each, with GATED a gate's and its up's by turns
             bias [N] or None;  out [M, N], with GATED [M, N / 2]
    Grid:    (cdiv(NUM_OUT, TILE), M)
    """
    let_next_start(OVERLAP)
    i_m = tl.program_id(1).to(tl.int64)
    o_out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_out = o_out < NUM_OUT
    p_out = out_ptr + i_m * (N // 2 if GATED else N) + first + o_out
    wait_for_previous(OVERLAP)
    if GATED:
        o_side = tl.arange(0, 2)[None, :]
        o_sum, o_bias = o_out[:, None] * 2 + o_side, first + o_out[:, None] + o_side * (N // 2)
        b_sum = _sum_splits(sums_ptr + i_m * WIDTH, bias_ptr, o_sum, o_bias, m_out[:, None], SIZE, SPLITS)
        b_gate, b_up = tl.split(b_sum.to(out_ptr.dtype.element_ty))
        tl.store(p_out, swiglu_tile(b_gate, b_up), mask=m_out)
    else:
        b_sum = _sum_splits(sums_ptr + i_m * WIDTH, bias_ptr, o_out, first + o_out, m_out, SIZE, SPLITS)
        tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit
def _sum_splits(p_sums, bias_ptr, o_sum, o_bias, m_out, SIZE, SPLITS: tl.constexpr):
    """Float32 sums of elements ``o_sum`` of all splits and of ``bias`` at ``o_bias``."""
    b_sum = tl.zeros_like(o_sum).to(tl.float32)
    if bias_ptr is not None:
        b_sum += tl.load(bias_ptr + o_bias, mask=m_out, other=0.0).to(tl.float32)
    return add_sums(b_sum, p_sums + o_sum, m_out, SIZE, SPLITS)


def add_splits(sums: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool, first: int = 0) -> None:
    """Writes the sum of ``sums`` and ``bias``, or with ``gated`` its SwiGLU, to columns of ``out`` from ``first`` on.

    Shapes: sums float32 [SPLITS, M, columns of the weight's tiles], with ``gated`` a gate's and its up's by turns
            bias [N]; out [M, N], with ``gated`` [M, N / 2]
    """
    (splits, num_rows, width), number = sums.shape, out.shape[1] - first
    constexprs = {"N": out.shape[1] * (1 + gated), "WIDTH": width, "GATED": gated, "SPLITS": splits}
    tile = ADD_TILE // (1 + gated)
    options = {"TILE": tile, **overlap_options(out.device)}
    grid = (triton.cdiv(number, tile), num_rows)
    add_splits_kernel[grid](sums, bias, out, num_rows * width, number, first, **constexprs, **options, **FUSED)


@triton.jit
def load_x(p_x, m_x, o_k, K: tl.constexpr, SPAN: tl.constexpr):
    """Columns ``o_k`` of the rows where ``m_x`` holds, zeros elsewhere and beyond K; SPAN are a step."""
    if K % SPAN != 0:
        m_x = m_x & (o_k < K)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def finished(b_acc):
    """``b_acc`` after tensor cores are done with it: an operation that takes no instruction and cannot be left out."""
    return tl.inline_asm_elementwise("", "=f,0", [b_acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(b_weight, b_x, b_acc, SLICES: tl.constexpr):
    """Tiles [N, K] and [M, K] -> [N, M], of each slice."""
    if SLICES == 1:
        return tl.dot(b_weight, tl.trans(b_x), b_acc)
    else:
        return tl.dot(b_weight, tl.permute(b_x, (0, 2, 1)), b_acc)
