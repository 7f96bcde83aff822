"""Integer decode functions of pattern sides: the residual's functions with the patterns' part added.

K: a token's score gets q . pattern from a table made once a program. V: weights are summed by pattern, in a dot of
their digits with zeros and ones, and the sums are multiplied by the patterns once, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..family import KeyFunctions, ValueFunctions
from ..uniform.integer import (
    add_values,
    begin_values,
    channel_parts,
    channel_query,
    channel_scores,
    finish_values,
    row_blocks,
)
from ..uniform.integer import (
    integer_functions as residual_functions,
)
from ..uniform.integer_codes import USE_ASM, join8, split_tiles, split_weights, tile_lanes
from ..uniform.integer_loads import block_of
from ..uniform.integer_tiles import count
from ..uniform.layout import TILES as MAX_TILES
from .layout import MIN_ROWS, NO_PATTERN, PatternSide

NONE = tl.constexpr(NO_PATTERN)
SOME = tl.constexpr(MIN_ROWS)  # patterns whose weights are summed by one matrix instruction


def integer_functions(side: PatternSide) -> KeyFunctions | ValueFunctions | None:
    """The device functions of a side, or ``None`` where the residual has none."""
    if residual_functions(side.residual) is None:
        return None
    if side.name == "k":
        return KeyFunctions(pattern_query, pattern_scores, MAX_TILES)
    return ValueFunctions(begin_masses, add_masses, finish_masses, MAX_TILES)


@triton.jit
def high_low(b_x):
    """Numbers within +-1 as two fp16 columns whose sum is exact to 22 bits."""
    b_high = b_x.to(tl.float16)
    b_low = (b_x - b_high.to(tl.float32)).to(tl.float16)
    return tl.reshape(tl.join(b_high, b_low), (b_x.shape[0], 2 * b_x.shape[1]))


@triton.jit
def add_high_low(b_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Products with ``high_low`` columns: [ROWS, COLUMNS] float32."""
    b_high, b_low = tl.split(tl.reshape(b_x, (ROWS, COLUMNS, 2)))
    return b_high + b_low


@triton.jit
def load_part(p_bank, o_m, i_h, FIRST: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr):
    """Channels FIRST .. FIRST + COUNT - 1 of patterns ``o_m``: [patterns, channels] fp16, padded with zeros."""
    o_d = tl.arange(0, block_of(COUNT))[None, :]
    p_rows = p_bank.to(tl.pointer_type(tl.float16)) + (o_m * STRIDE + i_h * D + FIRST)[:, None] + o_d
    return tl.load(p_rows, mask=o_d < COUNT, other=0.0)


@triton.jit
def pattern_query(p_q, p_bank, i_h, b_heads, scale, K: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """The query as the residual's scores take it, and q . pattern [K.ROWS, BLOCK_G]."""
    PARTS: tl.constexpr = channel_parts(K.BITS, D)
    query = channel_query(p_q, p_bank, i_h, b_heads, scale, K, D, BLOCK_G)
    b_top = tl.maximum(query[count(PARTS)], 1e-30)
    ROWS: tl.constexpr = K.ROWS
    b_table = tl.zeros([ROWS, 2 * BLOCK_G], tl.float32)
    o_m = tl.arange(0, ROWS)
    for i in tl.static_range(count(PARTS)):
        b_m = load_part(p_bank, o_m, i_h, i * (D // 2), PARTS[i], K.STRIDE, D)
        b_table = tl.dot(b_m, high_low(query[i] / b_top[None, :]), b_table)
    query += (add_high_low(b_table, ROWS, BLOCK_G) * b_top[None, :],)
    return query


@triton.jit
def pattern_scores(
    query,
    p_codes,
    p_meta,
    i_h,
    K: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Scores of a page: the residual's, plus q . pattern from the table by each token's index.

    The compiler takes the layout of the later of two operations, so the dot comes last and keeps its own.
    """
    ROWS: tl.constexpr = T // TILES
    b_table = query[count(channel_parts(K.BITS, D)) + 1]
    o_byte = tile_lanes(ROWS)[:, None] * TILES + tl.arange(0, TILES)[None, :]
    b_index = tl.load(p_meta + i_h * T + o_byte).to(tl.int32)
    b_at = tl.reshape(tl.minimum(b_index, K.ROWS - 1), (T, 1))
    b_pattern = tl.gather(b_table, tl.broadcast_to(b_at, (T, BLOCK_G)), 0)
    b_pattern = tl.permute(tl.reshape(b_pattern, (ROWS, TILES, BLOCK_G)), (0, 2, 1))
    b_pattern = tl.where((b_index == NONE)[:, None, :], 0.0, b_pattern)
    return b_pattern + channel_scores(query, p_codes, p_meta + K.INDEX, i_h, K, TILES, T, D, BLOCK_G)


@triton.constexpr_function
def hit_asm(rows):
    """PTX: -128 in each of four bytes where ``$1`` equals ``$2`` + ``first``, else 0.

    A byte whose low 7 bits differ gets a carry into its highest bit. Up to 64 patterns, 255 differs in those, too.
    """
    differ = "lop3.b32 t, $1, $2, 0x7f7f7f7f, 0x28; add.u32 t, t, 0x7f7f7f7f;"  # (a ^ b) & c
    if rows > 64:
        differ += " lop3.b32 u, $1, $2, t, 0xbe; mov.b32 t, u;"  # (a ^ b) | c
    return f"{{ .reg .b32 t, u; {differ} lop3.b32 $0, t, 0x80808080, 0, 0x0c; }}"  # ~a & b


@triton.jit
def hits(b_index, b_m, ROWS: tl.constexpr):
    """-128 where an index [.., tokens] is that of a pattern [patterns, ..], else 0; int8."""
    if USE_ASM:
        asm: tl.constexpr = hit_asm(ROWS)
        b_hit = tl.inline_asm_elementwise(asm, "=r,r,r", [b_index, b_m], dtype=tl.int8, is_pure=True, pack=4)
    else:
        b_hit = tl.where(b_index == b_m, -128, 0).to(tl.int8)
    return b_hit


@triton.jit
def begin_masses(V: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr):
    """Zeroed sums: the residual's, and weights by pattern, [SOME, BLOCK_G] each."""
    sums = begin_values(V, TILES, T, D, BLOCK_G)
    for _ in tl.static_range(V.ROWS // SOME):
        sums += (tl.zeros([SOME, BLOCK_G], tl.float32),)
    return sums


@triton.jit
def add_masses(
    sums,
    b_p,
    b_shrink,
    p_codes,
    p_meta,
    i_h,
    V: tl.constexpr,
    TILES: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The sums times ``b_shrink``, plus a page weighed by ``b_p``."""
    ROWS: tl.constexpr = T // TILES
    WHOLE: tl.constexpr = 32512.0  # a weight of 1 in fixed point: its high digit is 127
    UNIT: tl.constexpr = -1 / (128 * 32512.0)  # of fixed point times ``hits``
    FIRST: tl.constexpr = count(row_blocks(V, D)) + V.GROUPS
    found = add_values(sums, b_p, b_shrink, p_codes, p_meta + V.INDEX, i_h, V, TILES, T, D, BLOCK_G)
    tiles = split_tiles(b_p * WHOLE, TILES, ROWS, BLOCK_G)
    o_m = tl.arange(0, SOME)
    weights: tl.tuple = ()
    tokens: tl.tuple = ()
    for j in tl.static_range(TILES):
        weights += (split_weights(tiles[j], ROWS, BLOCK_G),)
        o_byte = tl.zeros([SOME, 1], tl.int32) + (j * ROWS + tl.arange(0, ROWS))[None, :]
        tokens += (tl.load(p_meta + i_h * T + o_byte),)
    for r in tl.static_range(V.ROWS // SOME):
        b_m = tl.broadcast_to((o_m + r * SOME).to(tl.uint8)[:, None], (SOME, ROWS))
        b_mass = tl.zeros([SOME, 2 * BLOCK_G], tl.int32)
        for j in tl.static_range(TILES):
            b_mass = tl.dot(hits(tokens[j], b_m, V.ROWS), weights[j], b_mass, out_dtype=tl.int32)
        found += (sums[FIRST + r] * b_shrink[None, :] + join8(b_mass, SOME, BLOCK_G) * UNIT,)
    return found


@triton.jit
def pattern_rows(
    masses, p_bank, i_h, FIRST: tl.constexpr, COUNT: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Channels FIRST .. FIRST + COUNT - 1 of all patterns, weighed by ``masses``: [channels, BLOCK_G] float32."""
    CHANNELS: tl.constexpr = block_of(COUNT)
    b_o = tl.zeros([CHANNELS, 2 * BLOCK_G], tl.float32)
    for r in tl.static_range(V.ROWS // SOME):
        b_m = load_part(p_bank, tl.arange(0, SOME) + r * SOME, i_h, FIRST, COUNT, V.STRIDE, D)
        b_o = tl.dot(tl.trans(b_m), masses[r], b_o)
    return add_high_low(b_o, CHANNELS, BLOCK_G)


@triton.jit
def finish_masses(sums, b_total, p_o, p_bank, i_h, b_heads, V: tl.constexpr, D: tl.constexpr):
    """Adds the patterns times their weights to the sums, then finishes as the residual does."""
    BLOCKS: tl.constexpr = row_blocks(V, D)
    FIRST: tl.constexpr = count(row_blocks(V, D)) + V.GROUPS
    BLOCK_G: tl.constexpr = b_total.shape[0]
    found: tl.tuple = ()
    masses: tl.tuple = ()
    for r in tl.static_range(V.ROWS // SOME):
        masses += (high_low(sums[FIRST + r] / b_total[None, :]),)
    for b in tl.static_range(count(BLOCKS)):
        b_o = pattern_rows(masses, p_bank, i_h, BLOCKS[b][1], BLOCKS[b][2], V, D, BLOCK_G)
        found += (sums[b] + b_o * b_total[None, :],)
    GROUPS: tl.constexpr = V.GROUPS
    for g in tl.static_range(GROUPS):
        found += (sums[count(BLOCKS) + g],)
    finish_values(found, b_total, p_o, p_bank, i_h, b_heads, V, D)
