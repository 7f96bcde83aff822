"""Dequantization in Triton: one program a (block, KV head) of one side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import DenseSide, Side
from ..pages import gather, read_dense
from ..planes import load_codes


@triton.jit
def dequant_kernel(
    memory_ptr, addresses_ptr, out_ptr, H,
    BITS: tl.constexpr, PER_CHANNEL: tl.constexpr, IS_K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    META_LANES: tl.constexpr, META: tl.constexpr, META_OFFSET: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """x = min + code * range / (2^BITS - 1).

    Shapes:  memory [M] uint8;  addresses [n] int64, where the sides start;  out [n, H, T, D]
    Grid:    (n * H,)
    """
    i_n = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    p_side = memory_ptr + tl.multiple_of(tl.load(addresses_ptr + i_n), 16)
    b_codes = load_codes(p_side + i_h * (T * BITS // 8 * D), BITS, IS_K, T, D, TILE_D).to(tl.float32)
    p_meta = (p_side + META_OFFSET + i_h * META).to(tl.pointer_type(tl.float16))
    o_t = tl.arange(0, T)[:, None]
    o_d = tl.arange(0, TILE_D)[None, :]
    m_d = o_d < D
    if PER_CHANNEL:
        p_low = p_meta + o_t // GROUP * D + o_d
        p_span = p_low + GROUPS * D
    else:
        p_low = p_meta + 2 * (o_d // GROUP * T + o_t % META_LANES * (T // META_LANES) + o_t // META_LANES)
        p_span = p_low + 1
    b_low = tl.load(p_low, mask=m_d, other=0.0).to(tl.float32)
    b_span = tl.load(p_span, mask=m_d, other=0.0).to(tl.float32)
    b_x = b_low + b_codes * (b_span / (2**BITS - 1))
    o_out = tl.program_id(0).to(tl.int64) * (T * D) + o_t * D + o_d
    tl.store(out_ptr + o_out, b_x.to(out_ptr.dtype.element_ty), mask=m_d)


def dequant_triton(memory: Tensor, addresses: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """See ``dequant``."""
    shape = (len(addresses), side.num_kv_heads, side.num_tokens, side.head_dim)
    if isinstance(side, DenseSide):
        return read_dense(gather(memory, addresses, side.nbytes), side).to(dtype)
    out = torch.empty(shape, dtype=dtype, device=memory.device)
    if len(addresses) == 0:
        return out
    dequant_kernel[(len(addresses) * side.num_kv_heads,)](
        memory, addresses, out, side.num_kv_heads,
        BITS=side.bits, PER_CHANNEL=side.axis == "channel", IS_K=side.side == "k",
        GROUP=side.group, GROUPS=side.num_groups, META_LANES=side.meta_lanes,
        META=side.head_meta_nbytes, META_OFFSET=side.meta_offset,
        T=side.num_tokens, D=side.head_dim, TILE_D=triton.next_power_of_2(side.head_dim), num_warps=8,
    )  # fmt: skip
    return out
