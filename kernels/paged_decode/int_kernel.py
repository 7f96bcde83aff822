"""Decode attention over uniform pages of one format with integer dots on the bare codes (8, 4 and 2 bits).

s = q . (low + c step) = unit (qi . c) + bias, where qi is q * range in 16-bit fixed point, split into two int8
columns a head; likewise o = unit (c . pi) + sum p low with pi from p * range. Codes see one shift and one ``and``.

Shapes:  q [B, HQ, D];  arena [nbytes] uint8;  offsets [R, 4] as in ``LayerFormats``;  items [W, 5], item_first and
         addresses as in ``DecodeWork``;  K codes [LANES, D] and V codes [D, LANES] of a head;
         o [parts, HQ, D] float32;  lse [parts, HQ] float32
Units:   addresses and offsets in bytes; lse in log2
Grid:    (bound * H,); one program per work item on rungs first_rung to end_rung - 1 and KV head, heads first, since
         they lie side by side in a page; the G = HQ / H query heads share its pages
Source:  FlashAttention-2 (arXiv 2307.08691); flash-decoding split-KV
"""

import triton
import triton.language as tl

from ..overlap import begin_overlap, end_overlap


@triton.jit
def unpack(b_w, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Plane ``PLANE`` of a tile of bytes as int8 codes; of 8 bits, code - 128."""
    if BITS == 8:
        b_c = (b_w ^ 0x80).to(tl.int8, bitcast=True)
    elif not ASM:
        b_c = ((b_w >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.int8)
    elif BITS == 4 and PLANE == 0:
        b_c = map4(b_w, "and.b32 $0, $1, 0x0F0F0F0F;")
    elif BITS == 4:
        b_c = map4(b_w, "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }")
    elif PLANE == 0:
        b_c = map4(b_w, "and.b32 $0, $1, 0x03030303;")
    elif PLANE == 1:
        b_c = map4(b_w, "{ .reg .b32 t; shr.u32 t, $1, 2; and.b32 $0, t, 0x03030303; }")
    elif PLANE == 2:
        b_c = map4(b_w, "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x03030303; }")
    else:
        b_c = map4(b_w, "{ .reg .b32 t; shr.u32 t, $1, 6; and.b32 $0, t, 0x03030303; }")
    return b_c


@triton.jit
def unpack_in_place(b_w, PLANE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Like ``unpack``, but planes 1 and 2 of 2 bits come times 4 and 16: they fit an int8 without a shift."""
    if BITS != 2 or PLANE == 0 or PLANE == 3:
        b_c = unpack(b_w, PLANE, BITS, ASM)
    elif not ASM:
        b_c = (b_w & (3 << (2 * PLANE))).to(tl.int8)
    elif PLANE == 1:
        b_c = map4(b_w, "and.b32 $0, $1, 0x0C0C0C0C;")
    else:
        b_c = map4(b_w, "and.b32 $0, $1, 0x30303030;")
    return b_c


@triton.jit
def map4(b_w, ASM: tl.constexpr):
    """``ASM`` on four bytes at a time."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [b_w], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def digits(b_x):
    """Floats within +-32512, rounded, as two int8: x = 256 high + low."""
    b_i = (b_x + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: the low 16 bits are the nearest integer
    return ((b_i + 128) >> 8).to(tl.int8), b_i.to(tl.int8)


@triton.jit
def split8(b_even, b_odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Even and odd rows of [ROWS, COLUMNS] floats as [ROWS, 2 COLUMNS] int8: (high, low) of each column.

    The rows are joined last: so the compiler lets a column's rows be neighbours in shared memory, where the dot
    reads eight at once and not one by one.
    """
    b_even_high, b_even_low = digits(b_even)
    b_odd_high, b_odd_low = digits(b_odd)
    b_x = tl.join(tl.join(b_even_high, b_even_low), tl.join(b_odd_high, b_odd_low))
    return tl.reshape(tl.permute(b_x, (0, 3, 1, 2)), (ROWS, 2 * COLUMNS))


@triton.jit
def join8(b_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, 2 COLUMNS] int32 sums of ``split8`` columns as [ROWS, COLUMNS] float32."""
    b_high, b_low = tl.split(tl.reshape(b_x, (ROWS, COLUMNS, 2)))
    return (b_high * 256 + b_low).to(tl.float32)


@triton.jit
def plane_scores(
    b_w, b_q, PLANE: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr
):
    """Scores [LANES, G] of one plane of K codes, in fixed-point units."""
    b_s = join8(tl.dot(unpack_in_place(b_w, PLANE, BITS, ASM), b_q, out_dtype=tl.int32), LANES, G)
    if BITS == 2 and (PLANE == 1 or PLANE == 2):
        b_s *= 0.0625 if PLANE == 2 else 0.25
    return b_s


@triton.jit
def scores(b_w, b_q, BITS: tl.constexpr, LANES: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr):
    """Scores of a page as [LANES, G, PLANES]; joining planes this way keeps them in registers, in token order."""
    b_s0 = plane_scores(b_w, b_q, 0, BITS, LANES, G, ASM)
    if BITS == 8:
        b_s = tl.reshape(b_s0, (LANES, G, 1))
    elif BITS == 4:
        b_s = tl.join(b_s0, plane_scores(b_w, b_q, 1, BITS, LANES, G, ASM))
    else:
        b_s1 = plane_scores(b_w, b_q, 1, BITS, LANES, G, ASM)
        b_s2 = plane_scores(b_w, b_q, 2, BITS, LANES, G, ASM)
        b_s3 = plane_scores(b_w, b_q, 3, BITS, LANES, G, ASM)
        b_s = tl.reshape(tl.join(tl.join(b_s0, b_s2), tl.join(b_s1, b_s3)), (LANES, G, 4))
    return b_s


@triton.jit
def plane_values(
    b_o, b_w, b_p, PLANE: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr
):
    """Adds one plane of V codes times its fixed-point weights, in row order, to ``b_o`` [D, 2 G]."""
    b_even, b_odd = tl.split(tl.permute(tl.reshape(b_p, (2, 2, LANES // 4, G)), (2, 0, 3, 1)))
    b_even, b_odd = tl.reshape(b_even, (LANES // 2, G)), tl.reshape(b_odd, (LANES // 2, G))
    return tl.dot(unpack(b_w, PLANE, BITS, ASM), split8(b_even, b_odd, LANES, G), b_o, out_dtype=tl.int32)


@triton.jit
def values(b_w, b_p, BITS: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr):
    """V codes of a page times weights ``b_p`` [LANES, G, PLANES], as [D, G] in fixed-point units."""
    b_o = tl.zeros([D, 2 * G], tl.int32)
    if BITS == 8:
        b_o = plane_values(b_o, b_w, tl.reshape(b_p, (LANES, G)), 0, BITS, LANES, G, ASM)
    elif BITS == 4:
        b_p0, b_p1 = tl.split(b_p)
        b_o = plane_values(b_o, b_w, b_p0, 0, BITS, LANES, G, ASM)
        b_o = plane_values(b_o, b_w, b_p1, 1, BITS, LANES, G, ASM)
    else:
        b_even, b_odd = tl.split(tl.reshape(b_p, (LANES, G, 2, 2)))
        b_p0, b_p2 = tl.split(b_even)
        b_p1, b_p3 = tl.split(b_odd)
        b_o = plane_values(b_o, b_w, b_p0, 0, BITS, LANES, G, ASM)
        b_o = plane_values(b_o, b_w, b_p1, 1, BITS, LANES, G, ASM)
        b_o = plane_values(b_o, b_w, b_p2, 2, BITS, LANES, G, ASM)
        b_o = plane_values(b_o, b_w, b_p3, 3, BITS, LANES, G, ASM)
    return join8(b_o, D, G)


@triton.jit
def load_top(p_tops, i_h):
    """The largest range of a head, read with its neighbour's: only loads of four bytes are fetched ahead."""
    b_pair = tl.load(p_tops.to(tl.pointer_type(tl.int32), bitcast=True) + i_h // 2)
    return (b_pair >> (i_h % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["first_rung", "end_rung"])
def decode_int_kernel(
    q_ptr,
    stride_q_b,
    stride_q_h,
    arena_ptr,
    offsets_ptr,
    items_ptr,
    item_first_ptr,
    first_rung,
    end_rung,
    addresses_ptr,
    o_ptr,
    lse_ptr,
    scale_log2,
    BITS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_overlap(OVERLAP)
    LANES: tl.constexpr = T * BITS // 8
    PLANES: tl.constexpr = 8 // BITS
    LEVELS: tl.constexpr = 2**BITS - 1
    FIXED: tl.constexpr = 32512.0  # largest fixed-point value: its high part is 127
    CENTER: tl.constexpr = 128.0 / LEVELS if BITS == 8 else 0.0  # what ``unpack`` takes off the codes, in ranges
    i_w, i_h = tl.load(item_first_ptr + first_rung) + tl.program_id(0) // H, tl.program_id(0) % H
    if i_w >= tl.load(item_first_ptr + end_rung):
        end_overlap(OVERLAP)
        return
    p_item = items_ptr + i_w * 5
    i_b = tl.load(p_item).to(tl.int64)
    first = tl.load(p_item + 1)
    num_blocks = tl.load(p_item + 2)
    part = tl.load(p_item + 3).to(tl.int64)
    p_offsets = offsets_ptr + tl.load(p_item + 4) * 4
    k_offset = tl.multiple_of(tl.load(p_offsets), 16)
    v_offset = tl.multiple_of(tl.load(p_offsets + 2), 16)
    o_g, o_d, o_lane = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, LANES)
    b_d = o_d < D
    b_rows = b_d[:, None] & (o_g < G)[None, :]
    p_q = q_ptr + i_b * stride_q_b + (i_h * G + o_g[None, :]) * stride_q_h + o_d[:, None]
    b_q = tl.load(p_q, mask=b_rows, other=0.0).to(tl.float32) * scale_log2
    b_q_top = tl.max(tl.abs(b_q), 0)

    # Offsets within a side, in bytes: codes of all heads, then metadata of all heads, then their largest ranges.
    CODES: tl.constexpr = LANES * D
    o_codes = i_h * CODES
    o_k_meta = H * CODES + i_h * (4 * D)
    o_v_meta = H * CODES + i_h * (4 * T)
    o_k_top = H * (CODES + 4 * D)
    o_v_top = H * (CODES + 4 * T)
    # Row m of a score tile is byte lane 4 (m % (LANES / 4)) + m / (LANES / 4): lanes that V wants side by side are then
    # rows of one thread.
    o_row = o_lane % (LANES // 4) * 4 + o_lane // (LANES // 4)
    o_meta = o_row[:, None] * (2 * PLANES) + tl.arange(0, 2 * PLANES)[None, :]

    b_m = tl.full([BLOCK_G], -1e30, tl.float32)
    b_l = tl.zeros([LANES, BLOCK_G], tl.float32)
    b_z = tl.zeros([LANES, BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
    for i in tl.range(first, first + num_blocks, num_stages=STAGES):
        p_slot = arena_ptr + tl.multiple_of(tl.load(addresses_ptr + i), 16)
        p_k, p_v = p_slot + k_offset, p_slot + v_offset
        p_k_meta = (p_k + o_k_meta).to(tl.pointer_type(tl.float16), bitcast=True)
        p_v_meta = (p_v + o_v_meta).to(tl.pointer_type(tl.float16), bitcast=True)
        b_k_low = tl.load(p_k_meta + o_d, mask=b_d, other=0.0).to(tl.float32)
        b_k_range = tl.load(p_k_meta + D + o_d, mask=b_d, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_codes + o_row[:, None] * D + o_d[None, :], mask=b_d[None, :], other=0)
        b_v = tl.load(p_v + o_codes + o_d[:, None] * LANES + o_lane[None, :], mask=b_d[:, None], other=0)
        b_meta = tl.load(p_v_meta + o_meta)  # [lane][plane][low, range]
        b_v_low, b_v_range = tl.split(tl.reshape(b_meta, (LANES, PLANES, 2)))
        b_v_low, b_v_range = b_v_low.to(tl.float32), b_v_range.to(tl.float32)
        k_top, v_top = load_top(p_k + o_k_top, i_h), load_top(p_v + o_v_top, i_h)

        b_bound = tl.maximum(b_q_top * k_top, 1e-30)
        b_qk = tl.reshape(b_q * b_k_range[:, None] * (FIXED / b_bound)[None, :], (BLOCK_D // 2, 2, BLOCK_G))
        b_even, b_odd = tl.split(tl.permute(b_qk, (0, 2, 1)))
        b_qi = split8(b_even, b_odd, BLOCK_D, BLOCK_G)
        b_bias = tl.sum(b_q * (b_k_low + b_k_range * CENTER)[:, None], 0)
        b_s = scores(b_k, b_qi, BITS, LANES, BLOCK_G, ASM)
        b_s = b_s * (b_bound * (1.0 / (LEVELS * FIXED)))[None, :, None] + b_bias[None, :, None]
        b_top = tl.maximum(b_m, tl.max(tl.max(b_s, 2), 0))
        b_shrink = tl.exp2(b_m - b_top)
        b_p = tl.exp2(b_s - b_top[None, :, None])
        b_l = b_l * b_shrink[None, :] + tl.sum(b_p, 2)
        b_z = b_z * b_shrink[None, :] + tl.sum(b_p * (b_v_low + b_v_range * CENTER)[:, None, :], 2)
        v_bound = tl.maximum(v_top, 1e-30)
        b_pv = b_p * (b_v_range * (FIXED / v_bound))[:, None, :]
        b_o = values(b_v, b_pv, BITS, LANES, BLOCK_D, BLOCK_G, ASM)
        b_acc = b_acc * b_shrink[None, :] + b_o * (v_bound * (1.0 / (LEVELS * FIXED)))
        b_m = b_top

    b_sum = tl.sum(b_l, 0)
    b_out = (b_acc + tl.sum(b_z, 0)[None, :]) / b_sum[None, :]
    row = part * (H * G) + i_h * G + o_g
    tl.store(o_ptr + row[None, :] * D + o_d[:, None], b_out, mask=b_rows)
    tl.store(lse_ptr + row, b_m + tl.log2(b_sum), mask=o_g < G)
    end_overlap(OVERLAP)
