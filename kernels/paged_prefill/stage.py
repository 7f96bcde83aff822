"""Blocks on other rungs than 0, written out once as dense pages that all query tiles then share.

A chunk of 2048 tokens has 64 query tiles a KV head: dequantizing in each would cost more than the attention itself.

Shapes:  arena [nbytes] uint8;  blocks [N] int32, entries of addresses;  staged [N, 2, H, T, D];
         staged_addresses as addresses [C * P] int64, written where ``blocks`` says;  banks [C] int64, ``None`` for
         sides without patterns, which lie ``k_bank`` and ``v_bank`` bytes behind;  width: P
Units:   addresses and offsets in bytes, from the start of arena and staged
Grid:    (N, H, T / TILE); one program per block, KV head and tile of tokens
"""

import triton
import triton.language as tl


@triton.jit
def stage_kernel(
    arena_ptr,
    k_codes,
    k_meta,
    v_codes,
    v_meta,
    blocks_ptr,
    first,
    addresses_ptr,
    staged_ptr,
    staged_addresses_ptr,
    width,
    banks_ptr,
    k_bank,
    v_bank,
    LOAD_K: tl.constexpr,
    K_SIDE: tl.constexpr,
    LOAD_V: tl.constexpr,
    V_SIDE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    i_n, i_h, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_block = tl.load(blocks_ptr + first + i_n)
    p_slot = arena_ptr + tl.multiple_of(tl.load(addresses_ptr + i_block), 16)
    p_k_bank, p_v_bank = arena_ptr, arena_ptr
    if banks_ptr is not None:
        p_bank = arena_ptr + tl.multiple_of(tl.load(banks_ptr + i_block // width), 16)
        p_k_bank, p_v_bank = p_bank + k_bank, p_bank + v_bank
    SIDE: tl.constexpr = H * T * D
    p_out = staged_ptr + i_n.to(tl.int64) * (2 * SIDE)
    if i_h + i_tile == 0:
        nbytes = i_n.to(tl.int64) * (2 * SIDE) * (staged_ptr.dtype.element_ty.primitive_bitwidth // 8)
        tl.store(staged_addresses_ptr + i_block, nbytes)
    o_t, o_d = i_tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    b_t = o_t < T
    b_mask = b_t[:, None] & (o_d < D)[None, :]
    p_out += ((i_h * T + o_t) * D)[:, None] + o_d[None, :]
    b_k = LOAD_K(p_slot + k_codes, p_slot + k_meta, p_k_bank, i_h, o_t, b_t, T, K_SIDE, H, T, D, BLOCK_D, DTYPE)
    tl.store(p_out, b_k, mask=b_mask)
    b_v = LOAD_V(p_slot + v_codes, p_slot + v_meta, p_v_bank, i_h, o_t, b_t, T, V_SIDE, H, T, D, BLOCK_D, DTYPE)
    tl.store(p_out + SIDE, b_v, mask=b_mask)
