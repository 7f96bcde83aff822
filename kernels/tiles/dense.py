"""Tile loader of dense pages: a side is ``[H][page tokens][D]`` elements, token rows contiguous."""

import triton
import triton.language as tl


@triton.jit
def load_dense(
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
    """Tokens ``o_t`` [TILE] of KV head ``i_h`` as [TILE, BLOCK_D]; zero where ``b_t`` is false, whatever lies there."""
    p = p_side.to(tl.pointer_type(STORED), bitcast=True)
    o_d = tl.arange(0, BLOCK_D)
    o_row = (i_h * num_page_tokens + o_t) * D
    b_mask = b_t[:, None] & (o_d < D)[None, :]
    return tl.load(p + o_row[:, None] + o_d[None, :], mask=b_mask, other=0.0).to(DTYPE)
