"""One token of each request in Triton: states are read and written where they lie."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..overlap import let_next_start, wait_for_previous
from .format_kernels import conv_of, load_state, store_state

NORM_EPS = tl.constexpr(1e-6)  # as in reference.py
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_unit(x_ptr, m_x):
    """The last dimension of a block, in float32 with length 1."""
    return unit(tl.load(x_ptr, mask=m_x, other=0.0).to(tl.float32))


@triton.jit
def unit(b_x):
    """The last dimension of a float32 block with length 1."""
    AXIS: tl.constexpr = len(b_x.shape) - 1
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, AXIS, keep_dims=True) + NORM_EPS)


@triton.jit
def log_kept(b_a, decay, dt_bias):
    """The log of what a state keeps: ``-decay softplus(a + dt_bias)``."""
    b_x = b_a.to(tl.float32) + dt_bias
    return -decay * tl.where(b_x > 20.0, b_x, tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0))))


@triton.jit
def silu(b_x):
    """``x sigmoid(x)`` of float32."""
    b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -LOG2_E))  # squared: half the instructions of exp and a division
    return b_x * b_root * b_root


@triton.jit
def gated_norm(b_x, b_z, b_weight, SIZE: tl.constexpr, EPS: tl.constexpr):
    """``x / rms(x) * weight * silu(z)`` over the last dimension, rounded as reference.py does, in the dtype of x.

    z and weight are float32; x has zeros beyond ``SIZE`` elements.
    """
    AXIS: tl.constexpr = len(b_x.shape) - 1
    b_wide = b_x.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, AXIS, keep_dims=True) / SIZE + EPS)
    b_normed = ((b_wide * b_scale).to(b_x.dtype).to(tl.float32) * b_weight).to(b_x.dtype)
    return (b_normed.to(tl.float32) * silu(b_z)).to(b_x.dtype)


@triton.jit
def conv_step_kernel(
    memory_ptr, x_ptr, weight_ptr, words_ptr, lengths_ptr, out_ptr, stride_x,
    C: tl.constexpr, W: tl.constexpr, CONVS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The short convolution of a tile of channels of one token, whose inputs move up in the state.

    The state is read while the kernel before still runs: that must not write states.

    Shapes:  x [B, C], rows ``stride_x`` apart;  weight [C, W];  words, lengths [B];  out [B, C]
             conv, ``CONVS`` bytes into a state: [C, W - 1]
    Grid:    (B * cdiv(C, TILE),)
    """
    TILES: tl.constexpr = (C + TILE - 1) // TILE
    i_b = (tl.program_id(0) // TILES).to(tl.int64)
    o_c = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    m_c = o_c < C
    p_weight = weight_ptr + o_c * W
    length = tl.load(lengths_ptr + i_b)
    p_state = conv_of(memory_ptr, tl.load(words_ptr + i_b), CONVS)
    p_conv = p_state.to(tl.pointer_type(x_ptr.dtype.element_ty)) + o_c * (W - 1)
    m_old, m_kept = o_c < tl.where(length > 1, C, 0), o_c < tl.where(length > 0, C, 0)
    b_last = tl.load(p_weight + W - 1, mask=m_c, other=0.0).to(tl.float32)
    b_sum = tl.zeros([TILE], tl.float32)
    olds = ()
    for i in tl.static_range(W - 1):
        olds += (tl.load(p_conv + i, mask=m_old, other=0.0),)  # type: ignore[assignment]
        b_sum += olds[i].to(tl.float32) * tl.load(p_weight + i, mask=m_c, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)  # only now: it reads states before it waits for this one
    b_x = tl.load(x_ptr + i_b * stride_x + o_c, mask=m_c, other=0.0)
    for i in tl.static_range(1, W - 1):
        tl.store(p_conv + i - 1, olds[i], mask=m_kept)
    tl.store(p_conv + W - 2, b_x, mask=m_kept)
    b_sum += b_x.to(tl.float32) * b_last
    tl.store(out_ptr + i_b * C + o_c, silu(b_sum).to(b_x.dtype), mask=m_c)


@triton.jit
def delta_step_kernel(
    memory_ptr, x_ptr, b_ptr, a_ptr, decay_ptr, dt_bias_ptr, words_ptr, lengths_ptr, z_ptr, norm_ptr, out_ptr,
    stride_gate, stride_z,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    EPS: tl.constexpr, FORMATS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head's state: scaled, corrected under k, and read with q; normed if there is ``z``.

    With ``z`` a program has all columns of its head. Everything but x is read while the kernel before, the convolution,
    still runs: it let this one begin when all before it had ended.

    Shapes:  x [B, 2 HK DK + HV DV], q, k and v;  b, a [B, HV], rows ``stride_gate`` apart;  decay, dt_bias [HV];
             words, lengths [B];  z [B, HV, DV], tokens ``stride_z`` apart, and norm [DV], both or neither;
             out [B, HV, DV], zeros for padding;  recurrent: see ``load_state``
    Grid:    (B * HV * cdiv(DV, BLOCK_V),)
    """
    let_next_start(OVERLAP)
    TILES: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    i_h = tl.program_id(0) // TILES % HV
    i_b = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < DK, o_v < DV
    decay, dt_bias = tl.load(decay_ptr + i_h), tl.load(dt_bias_ptr + i_h)
    length = tl.load(lengths_ptr + i_b)
    word = tl.load(words_ptr + i_b)
    b_state = load_state(memory_ptr, word, i_h, o_k, o_v, tl.where(length > 1, DK, 0), DV, DK, DV, FORMATS)
    # Past L1, which may hold what lay there before these were written, right before the convolution.
    b_a = tl.load(a_ptr + i_b * stride_gate + i_h, cache_modifier=".cg")
    b_b = tl.load(b_ptr + i_b * stride_gate + i_h, cache_modifier=".cg").to(tl.float32)
    if z_ptr is not None:
        p_z = z_ptr + i_b * stride_z + i_h * DV + o_v
        b_z = tl.load(p_z, mask=m_v, other=0.0, cache_modifier=".cg").to(tl.float32)
        b_norm = tl.load(norm_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_state *= tl.exp(log_kept(b_a, decay, dt_bias))
    beta = 1.0 / (1.0 + tl.exp(-b_b))
    wait_for_previous(OVERLAP)
    p_x = x_ptr + i_b * (2 * HK * DK + HV * DV)
    p_k = p_x + i_h // (HV // HK) * DK + o_k
    b_q, b_k = load_unit(p_k, m_k), load_unit(p_k + HK * DK, m_k)
    b_v = tl.load(p_x + 2 * HK * DK + i_h * DV + o_v, mask=m_v, other=0.0)
    b_held = tl.sum(b_state * b_k[:, None], 0)
    b_state += b_k[:, None] * ((b_v.to(tl.float32) - b_held) * beta)[None, :]
    b_out = tl.sum(b_state * b_q[:, None], 0) * (DK**-0.5)
    store_state(memory_ptr, word, b_state, i_h, o_k, o_v, tl.where(length > 0, DK, 0), DV, DK, DV, FORMATS)
    b_out = tl.where(length > 0, b_out, 0.0).to(b_v.dtype)
    if z_ptr is not None:
        b_out = gated_norm(b_out, b_z, b_norm, DV, EPS)
    tl.store(out_ptr + (i_b * HV + i_h) * DV + o_v, b_out, mask=m_v)


@triton.jit(do_not_specialize=["N"])
def gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, stride_z, N,
    HV: tl.constexpr, DV: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """``gated_norm`` of some heads; ``out`` may be x.

    Shapes:  x, out [T, HV, DV];  z [T, HV, DV], tokens ``stride_z`` apart;  weight [DV];  N is T HV
    Grid:    (cdiv(N, ROWS),)
    """
    let_next_start(OVERLAP)
    o_v = tl.arange(0, BLOCK_V)
    b_weight = tl.load(weight_ptr + o_v, mask=o_v < DV, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    o_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (o_n < N)[:, None] & (o_v < DV)[None, :]
    o_x = o_n[:, None] * DV + o_v[None, :]
    b_x = tl.load(x_ptr + o_x, mask=mask, other=0.0)
    p_z = z_ptr + (o_n // HV * stride_z + o_n % HV * DV)[:, None] + o_v[None, :]
    b_z = tl.load(p_z, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_x, gated_norm(b_x, b_z, b_weight[None, :], DV, EPS), mask=mask)
