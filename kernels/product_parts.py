"""What kernels of products share: device functions that load, activate and store, and sizes for their launches."""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR = 8  # 16-bit elements of a load of 16 bytes, the widest
MAX_FLOAT8 = tl.constexpr(448.0)  # the largest of float8_e4m3fn


def power_of_2_below(number: int) -> int:
    """The largest power of 2 up to ``number``, 0 for 0."""
    return 1 << number.bit_length() >> 1


def num_splits(most: int, programs: int, number: int, limit: int) -> int:
    """The most splits up to ``most`` that divide a ``number`` of steps and make ``limit`` programs at most."""
    splits = max(1, min(most, limit // programs))
    while number % splits:
        splits -= 1
    return splits


@triton.jit
def weight_rows(i_p, N, GATED: tl.constexpr, FULL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Int64 numbers [BLOCK_N] of a program's rows of a weight, with GATED a gate's and its up's by turns.

    Rows beyond the last one repeat it, which needs no mask; with FULL there are none, and addresses are simpler.
    """
    o_n = i_p.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        o_n = o_n // 2 + o_n % 2 * (N // 2)
    return o_n if FULL else tl.minimum(o_n, N - 1)


@triton.jit
def load_columns(p, o_k, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr):
    """Columns ``o_k`` of rows of K, zeros beyond."""
    if K % BLOCK_K == 0:
        return tl.load(p + o_k, eviction_policy=EVICTION)
    else:
        return tl.load(p + o_k, mask=o_k < K, other=0.0, eviction_policy=EVICTION)


@triton.jit
def load_bias(bias_ptr, o_n):
    """Biases of rows ``o_n`` of the weight, float32 [BLOCK_N]; zeros without a bias."""
    if bias_ptr is None:
        return tl.zeros_like(o_n).to(tl.float32)
    else:
        return tl.load(bias_ptr + o_n).to(tl.float32)


@triton.jit
def store_row(b_sum, b_bias, out_ptr, i_p, N, GATED: tl.constexpr, ACTIVATION: tl.constexpr = None):
    """Stores what program ``i_p`` has of a row of a product: sums and biases [BLOCK_N] of its rows of the weight.

    With GATED they are a gate's and its up's by turns, and their activation is stored, in rows of N / 2.
    """
    b_out = _finish(b_sum + b_bias, out_ptr.dtype.element_ty, GATED, ACTIVATION)
    o_out = i_p * b_out.shape[0] + tl.arange(0, b_out.shape[0])
    tl.store(out_ptr + o_out, b_out, mask=o_out < (N // 2 if GATED else N))


@triton.jit
def store_tile(b_sum, b_bias, out_ptr, i_p, o_m, m_m, N, GATED: tl.constexpr, ACTIVATION: tl.constexpr = None):
    """As ``store_row``, for rows ``o_m`` of the product where ``m_m`` holds; ``b_sum`` is [BLOCK_N, BLOCK_M]."""
    b_out = _finish(b_sum + tl.reshape(b_bias, [b_bias.shape[0], 1]), out_ptr.dtype.element_ty, GATED, ACTIVATION)
    width = N // 2 if GATED else N
    o_out = i_p * b_out.shape[0] + tl.arange(0, b_out.shape[0])
    m_out = m_m[None, :] & (o_out < width)[:, None]
    tl.store(out_ptr + o_m[None, :] * width + o_out[:, None], b_out, mask=m_out)


@triton.jit
def store_sums(b_sum, out_ptr, i_p, num_tiles, o_m, m_m, M):
    """Stores sums [BLOCK_N, BLOCK_M] of tile ``i_p`` of ``num_tiles`` and of split ``program_id(2)`` of the columns.

    Shapes:  out float32 [SPLITS, M, num_tiles BLOCK_N], in the order of the tiles
    """
    BLOCK_N: tl.constexpr = b_sum.shape[0]
    o_n = i_p * BLOCK_N + tl.arange(0, BLOCK_N)
    o_out = (tl.program_id(2) * M + o_m).to(tl.int64)[None, :] * (num_tiles * BLOCK_N) + o_n[:, None]
    tl.store(out_ptr + o_out, b_sum, mask=m_m[None, :])


@triton.jit
def add_sums(b_sum, p_sums, mask, SIZE, SPLITS: tl.constexpr):
    """``b_sum`` and the float32 sums at ``p_sums`` of all splits, which lie SIZE elements apart, in their order."""
    for split in tl.static_range(SPLITS):
        b_sum += tl.load(p_sums + split * SIZE, mask=mask, other=0.0)
    return b_sum


@triton.jit
def _finish(b_sum, DTYPE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr):
    """A product's sums rounded to DTYPE, and with GATED activated: [BLOCK_N, ...] -> [BLOCK_N / 2, ...]."""
    b_out = b_sum.to(DTYPE)
    if not GATED:
        return b_out
    else:
        OUTS: tl.constexpr = b_out.shape[0] // 2
        if len(b_out.shape) == 1:
            b_gate, b_up = tl.split(tl.reshape(b_out, [OUTS, 2]))
        else:
            b_gate, b_up = tl.split(tl.permute(tl.reshape(b_out, [OUTS, 2, b_out.shape[1]]), (0, 2, 1)))
        return swiglu_tile(b_gate, b_up, ACTIVATION)


@triton.jit
def swiglu_tile(b_gate, b_up, ACTIVATION: tl.constexpr = None):
    """``silu(gate) * up`` with the roundings of ``swiglu_kernel``, or what ``moe.SwiGLU`` says where it is given."""
    b_wide_gate, b_wide_up = b_gate.to(tl.float32), b_up.to(tl.float32)
    if ACTIVATION is not None:
        if ACTIVATION.limit is not None:
            b_wide_gate = _at_most(b_wide_gate, ACTIVATION.limit)
            b_wide_up = -_at_most(-_at_most(b_wide_up, ACTIVATION.limit), ACTIVATION.limit)
        b_wide_up += ACTIVATION.shift
    ALPHA: tl.constexpr = 1.0 if ACTIVATION is None else ACTIVATION.alpha
    b_gated = (b_wide_gate / (1.0 + tl.exp(-ALPHA * b_wide_gate))).to(b_gate.dtype).to(tl.float32)
    return (b_gated * b_wide_up).to(b_gate.dtype)


@triton.jit
def quantize_tile(b_wide):
    """8-bit floats of float32 ``b_wide`` [ROWS, COLUMNS], and the scale of each row, whose largest becomes 448."""
    b_scale = scale_of(tl.max(tl.abs(b_wide), 1))
    return quantize_by(b_wide, b_scale[:, None]), b_scale


@triton.jit
def scale_of(b_top):
    """The scales of 8-bit floats of which the largest have magnitudes ``b_top``."""
    return tl.maximum(b_top, 1e-12) / MAX_FLOAT8


@triton.jit
def quantize_by(b_wide, b_scale):
    """8-bit floats of float32 over scales."""
    return tl.minimum(tl.maximum(b_wide * (1.0 / b_scale), -MAX_FLOAT8), MAX_FLOAT8).to(tl.float8e4nv)


@triton.jit
def _at_most(b, LIMIT: tl.constexpr):
    """The smaller of ``b`` and LIMIT; a NaN stays one."""
    return tl.where(b > LIMIT, LIMIT, b)
