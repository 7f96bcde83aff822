"""Device functions of integer dots: bit fields of bytes as int8 codes, floats as fixed point in two int8 columns."""

import triton
import triton.language as tl

USE_ASM = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no inline assembly


@triton.constexpr_function
def moved_field(name, source, shift, bits, to):
    """PTX: ``bits`` bits from ``shift`` on of each byte of ``source``, at bit ``to`` of register ``name``."""
    move = f"shr.u32 {name}, {source}, {shift - to}" if shift > to else f"shl.b32 {name}, {source}, {to - shift}"
    return f"{move}; and.b32 {name}, {name}, {(2**bits - 1 << to) * 0x01010101:#x};"


@triton.constexpr_function
def field_asm(shift, bits, to):
    """PTX: ``bits`` bits from ``shift`` on of each of four bytes, at bit ``to``."""
    return f"{{ .reg .b32 t; {moved_field('t', '$1', shift, bits, to)} mov.b32 $0, t; }}"


@triton.constexpr_function
def joined_asm(shift, bit, to):
    """PTX: two bits from ``shift`` on of four bytes, above them bit ``bit`` of four others; at bit ``to``."""
    low, high = moved_field("t", "$1", shift, 2, to), moved_field("u", "$2", bit, 1, to + 2)
    return f"{{ .reg .b32 t, u; {low} {high} or.b32 $0, t, u; }}"


@triton.jit
def take_bits(b_w, SHIFT: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr):
    """``BITS`` bits of bytes from ``SHIFT`` on as int8 times ``2^TO``; of 8 bits, code - 128."""
    if BITS == 8:
        b_c = (b_w ^ 0x80).to(tl.int8, bitcast=True)
    elif USE_ASM:
        asm: tl.constexpr = field_asm(SHIFT, BITS, TO)
        b_c = tl.inline_asm_elementwise(asm, "=r,r", [b_w], dtype=tl.int8, is_pure=True, pack=4)
    else:
        b_c = (((b_w >> SHIFT) & (2**BITS - 1)) << TO).to(tl.int8)
    return b_c


@triton.jit
def take_joined(b_low, b_high, SHIFT: tl.constexpr, BIT: tl.constexpr, TO: tl.constexpr):
    """3-bit codes as int8 times ``2^TO``: two bits of ``b_low`` from ``SHIFT`` on, then bit ``BIT`` of ``b_high``."""
    if USE_ASM:
        asm: tl.constexpr = joined_asm(SHIFT, BIT, TO)
        b_c = tl.inline_asm_elementwise(asm, "=r,r,r", [b_low, b_high], dtype=tl.int8, is_pure=True, pack=4)
    else:
        b_c = ((((b_low >> SHIFT) & 3) | (((b_high >> BIT) & 1) << 2)) << TO).to(tl.int8)
    return b_c


@triton.jit
def zero_value(b_low, b_range, BITS: tl.constexpr, ETA: tl.constexpr):
    """The value of a code for which ``take_bits`` gives 0."""
    SHARE: tl.constexpr = ETA + (1.0 - 2.0 * ETA) * (128.0 / 255.0 if BITS == 8 else 0.0)  # of the range
    return b_low + b_range * SHARE if SHARE > 0 else b_low


@triton.jit
def fixed_point(b_bound, BITS: tl.constexpr, ETA: tl.constexpr = 0.0):
    """(Factor that makes floats within +-``b_bound`` fixed point, unit of sums of these times ``BITS``-bit codes)."""
    FIXED: tl.constexpr = 32512.0  # largest fixed-point value: its high digit is 127
    b_bound = tl.maximum(b_bound, 1e-30)  # rows of zeros
    return FIXED / b_bound, b_bound * ((1.0 - 2.0 * ETA) / ((2**BITS - 1) * FIXED))


@triton.jit
def fixed(b_x):
    """Floats within +-32512, rounded, in the low 16 bits of int32."""
    return (b_x + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23


@triton.jit
def digits(b_i):
    """The low 16 bits of int32 as two int8: 256 high + low."""
    return ((b_i + 128) >> 8).to(tl.int8), b_i.to(tl.int8)


@triton.jit
def split8(b_even, b_odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Even and odd rows of [ROWS, COLUMNS] ``fixed`` numbers as [ROWS, 2 COLUMNS] int8: (high, low) of each column.

    The rows are joined last, so that the compiler makes a column's rows neighbours in shared memory, where the dot
    reads eight at once and not one by one.
    """
    b_even_high, b_even_low = digits(b_even)
    b_odd_high, b_odd_low = digits(b_odd)
    b_x = tl.join(tl.join(b_even_high, b_even_low), tl.join(b_odd_high, b_odd_low))
    return tl.reshape(tl.permute(b_x, (0, 3, 1, 2)), (ROWS, 2 * COLUMNS))


@triton.jit
def split_rows(b_i, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] ``fixed`` numbers as [ROWS, 2 COLUMNS] int8 digits."""
    b_even, b_odd = tl.split(tl.permute(tl.reshape(b_i, (ROWS // 2, 2, COLUMNS)), (0, 2, 1)))
    return split8(b_even, b_odd, ROWS, COLUMNS)


@triton.jit
def split_weights(b_p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] floats in the row order of ``tile_lanes`` as [ROWS lanes, 2 COLUMNS] int8 digits."""
    b_even, b_odd = tl.split(tl.permute(tl.reshape(fixed(b_p), (2, 2, ROWS // 4, COLUMNS)), (2, 0, 3, 1)))
    b_even, b_odd = tl.reshape(b_even, (ROWS // 2, COLUMNS)), tl.reshape(b_odd, (ROWS // 2, COLUMNS))
    return split8(b_even, b_odd, ROWS, COLUMNS)


@triton.jit
def join8(b_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, 2 COLUMNS] int32 sums over ``split8`` columns as [ROWS, COLUMNS] float32."""
    b_high, b_low = tl.split(tl.reshape(b_x, (ROWS, COLUMNS, 2)))
    return (b_high * 256 + b_low).to(tl.float32)


@triton.jit
def tile_lanes(ROWS: tl.constexpr):
    """The lane of each row of a score tile: four lanes side by side are rows of one thread."""
    o_row = tl.arange(0, ROWS)
    return o_row % (ROWS // 4) * 4 + o_row // (ROWS // 4)


@triton.jit
def join_tiles(tiles, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """1, 2 or 4 tiles [ROWS, COLUMNS] as [ROWS, COLUMNS, TILES]; this order of joins keeps them in registers."""
    if TILES == 1:
        b_x = tl.reshape(tiles[0], (ROWS, COLUMNS, 1))
    elif TILES == 2:
        b_x = tl.join(tiles[0], tiles[1])
    else:
        b_x = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
        b_x = tl.reshape(b_x, (ROWS, COLUMNS, 4))
    return b_x


@triton.jit
def split_tiles(b_x, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of ``join_tiles``: the tiles as a tuple."""
    if TILES == 1:
        tiles: tl.tuple = (tl.reshape(b_x, (ROWS, COLUMNS)),)
    elif TILES == 2:
        tiles = tl.split(b_x)
    else:
        b_even, b_odd = tl.split(tl.reshape(b_x, (ROWS, COLUMNS, 2, 2)))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        tiles = (b_0, b_1, b_2, b_3)
    return tiles
