"""Tile loader of uniform pages: codes in byte planes along tokens with (min, range) per group, dequantized.

Serves every number of bits, axis and group; the layout is that of ``kernels.layout.UniformSide``. A tile reads each of
its bytes once per plane it covers, so the integer kernels are the fast path where they apply.
"""

import triton
import triton.language as tl


@triton.jit
def load_uniform(
    p_side,
    i_h,
    o_t,
    b_t,
    num_page_tokens,
    IS_V: tl.constexpr,
    BITS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    STORED: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Tokens ``o_t`` [TILE] of KV head ``i_h`` as [TILE, BLOCK_D]; zero where ``b_t`` is false."""
    o_d = tl.arange(0, BLOCK_D)
    b_mask = b_t[:, None] & (o_d < D)[None, :]
    p_codes = p_side + i_h * (T * BITS // 8 * D)
    if BITS == 3:  # a set of the low two bits, then one of the high bit
        b_codes = load_codes(p_codes, o_t, o_d, b_mask, 2, IS_V, T, D)
        b_codes += load_codes(p_codes + T // 4 * D, o_t, o_d, b_mask, 1, IS_V, T, D) << 2
    else:
        b_codes = load_codes(p_codes, o_t, o_d, b_mask, BITS, IS_V, T, D)
    EXTENT: tl.constexpr = D if PER_TOKEN else T
    GROUPS: tl.constexpr = (EXTENT + GROUP - 1) // GROUP
    ACROSS: tl.constexpr = T if PER_TOKEN else D
    p_meta = (p_side + H * (T * BITS // 8 * D) + i_h * (4 * GROUPS * ACROSS)).to(
        tl.pointer_type(tl.float16), bitcast=True
    )
    if PER_TOKEN:
        PLANES: tl.constexpr = 1 if BITS == 8 else (2 if BITS == 4 else 4)
        o_token = (o_t % (T // PLANES) * PLANES + o_t // (T // PLANES)) * 2
        o_low = o_token[:, None] + (o_d // GROUP * (2 * T))[None, :]
        o_range = o_low + 1
    else:
        o_low = (o_t // GROUP * D)[:, None] + o_d[None, :]
        o_range = o_low + GROUPS * D
    b_low = tl.load(p_meta + o_low, mask=b_mask, other=0.0).to(tl.float32)
    b_range = tl.load(p_meta + o_range, mask=b_mask, other=0.0).to(tl.float32)
    return (b_low + b_codes.to(tl.float32) * (b_range * (1.0 / (2**BITS - 1)))).to(DTYPE)


@triton.jit
def load_codes(p_codes, o_t, o_d, b_mask, WIDTH: tl.constexpr, IS_V: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """Codes of one plane set of ``WIDTH`` bits: token t in plane t // lanes of byte lane t % lanes."""
    LANES: tl.constexpr = T * WIDTH // 8
    o_lane = (o_t % LANES)[:, None]
    o_byte = o_d[None, :] * LANES + o_lane if IS_V else o_lane * D + o_d[None, :]
    b_byte = tl.load(p_codes + o_byte, mask=b_mask, other=0).to(tl.int32)
    return (b_byte >> (o_t // LANES * WIDTH)[:, None]) & ((1 << WIDTH) - 1)
