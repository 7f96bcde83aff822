"""Child of ``test_conformance``: Triton seals, demotions and tile loaders of every family against its references."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from qkv_engine.kernels.demote import demote_reference
from qkv_engine.kernels.demote.triton import demote_triton
from qkv_engine.kernels.formats import FAMILIES, BlockLayout, Family, PageShape, Side
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.fusion import FUSED
from qkv_engine.kernels.seal import seal_reference
from qkv_engine.kernels.seal.triton import seal_triton

from ..toy_format.registered import registered
from .format_pages import all_sides, family_sides, family_steps, lay_apart, make_blocks, side_rows, slot, sow_odd
from .interpreted import report

HEAD_DIMS = {80: 1, 64: 7, 128: 9, 6: 7}  # by head dim n: every n-th side of a family is run
TILE = 32  # tokens loaded at a time
VISIBLE = 96  # tokens; later ones are masked


@triton.jit
def tile_kernel(
    memory_ptr, tokens_ptr, out_ptr, codes, meta, bank, NUM_TOKENS, LOAD: tl.constexpr, SIDE: tl.constexpr,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Loads tokens [tiles * TILE] of head ``program_id(1)``, those below ``NUM_TOKENS``: out [H, tiles * TILE, D]."""
    i_row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_t = tl.load(tokens_ptr + i_row)
    i_h = tl.program_id(1)
    p_bank = memory_ptr + bank
    b_x = LOAD(
        memory_ptr + codes, memory_ptr + meta, p_bank, i_h, o_t, o_t < NUM_TOKENS, T, SIDE, H, T, D, BLOCK_D, tl.float32
    )
    o_d = tl.arange(0, BLOCK_D)
    p_out = out_ptr + (i_h * tl.num_programs(0) * TILE + i_row)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_x, mask=(o_d < D)[None, :])


def seal_case(sides: list[Side], dtype: torch.dtype) -> float:
    """Bytes that differ, in blocks with every value that quantizers trip over; a dense side among the sides."""
    shape = sides[0].shape
    sides = [side for side in sides if side.dense_dtype in (None, dtype)] + [Dense("dense", dtype).layout(shape, "k")]
    blocks = sow_odd(make_blocks(sides, shape, num_blocks=2, dtype=dtype, lay_out=lay_apart))
    expected = blocks.memory.clone()
    where, windows = (blocks.src, blocks.dst, blocks.source, blocks.target), torch.tensor([1, 40])
    flags = seal_reference(expected, *where, blocks.banks, windows)
    finite = torch.ones_like(flags)
    seal_triton(blocks.memory, *where, finite, blocks.banks, windows)
    return float((blocks.memory != expected).sum() + (finite != flags).sum())


def demote_case(steps: list[tuple[Side, Side]]) -> float:
    """Bytes that differ, with sides that keep their format among the steps."""
    blocks = make_blocks([old for old, _ in steps], steps[0][0].shape, num_blocks=2, lay_out=lay_apart)
    layout = lay_apart([new for _, new in steps])
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, blocks.banks)
    expected = blocks.memory.clone()
    where = blocks.dst, blocks.next, blocks.target, layout
    demote_reference(expected, *where)
    demote_triton(blocks.memory, *where)
    return float((blocks.memory != expected).sum())


def tile_case(sides: list[Side]) -> float:
    """Largest difference of loaded tiles, tokens in any order, some of them masked."""
    shape, worst = sides[0].shape, 0.0
    blocks = make_blocks(sides, shape, lay_out=lay_apart)
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, blocks.banks)
    tokens = torch.randperm(shape.num_tokens, generator=torch.Generator().manual_seed(0)).int()
    for i, (side, place) in enumerate(zip(blocks.target.sides, blocks.target.places, strict=True)):
        bank = None if blocks.banks is None else int(blocks.banks[0])
        x = side.family.dequantize(side_rows(blocks.memory, blocks.dst, blocks.target, i, bank), side)[0]
        out = torch.full((shape.num_kv_heads, shape.num_tokens, shape.head_dim), float("nan"))
        tile_kernel[shape.num_tokens // TILE, shape.num_kv_heads](
            blocks.memory, tokens, out, int(blocks.dst) + place.codes, int(blocks.dst) + place.meta,
            (bank or 0) + blocks.target.bank_offsets[i], VISIBLE,
            LOAD=side.family.triton().load_tile, SIDE=side.spec, H=shape.num_kv_heads, T=shape.num_tokens,
            D=shape.head_dim, BLOCK_D=triton.next_power_of_2(shape.head_dim), TILE=TILE, **FUSED,
        )  # fmt: skip
        expected = torch.where((tokens < VISIBLE)[None, :, None], x[:, tokens.long()], 0)
        worst = max(worst, float((out - expected).abs().nan_to_num(float("inf")).max()))
    return worst


def far_case() -> float:
    """Bytes that differ in slots beyond 2^31 bytes."""
    shape = PageShape(1, 128, 64)
    small = make_blocks(all_sides(4, shape)[:2], shape)
    narrow = BlockLayout.stack(all_sides(2, shape)[:2])
    where = torch.tensor([2**31 + 64]), torch.tensor([2**31 + 2**18]), torch.tensor([2**31 + 2**19])
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)
    slot(memory, where[0], small.source)[:] = slot(small.memory, small.src, small.source)
    for address in where[1:]:
        slot(memory, address, small.target)[:] = 255
    seal_triton(memory, where[0], where[1], small.source, small.target, torch.ones_like(where[0]))
    demote_triton(memory, where[1], where[2], small.target, narrow)
    seal_reference(small.memory, small.src, small.dst, small.source, small.target)
    demote_reference(small.memory, small.dst, small.next, small.target, narrow)
    return float((slot(memory, where[2], narrow) != slot(small.memory, small.next, narrow)).sum())


def family_cases(family: Family) -> dict[str, Callable[[], float]]:
    cases: dict[str, Callable[[], float]] = {}
    for head_dim, every in HEAD_DIMS.items():
        sides = family_sides(family, PageShape(2, 128, head_dim))[::every]
        if not sides:
            continue
        name = f"{family.name} D{head_dim}"
        cases[f"seal {name}"] = partial(seal_case, sides, torch.bfloat16)
        cases[f"tile {name}"] = partial(tile_case, sides)
        steps = family_steps(sides)
        if steps:
            cases[f"demote {name}"] = partial(demote_case, steps)
    return cases


def main() -> None:
    cases: dict[str, Callable[[], float]] = {"beyond 2 GiB": far_case}
    for family in FAMILIES:
        cases |= family_cases(family)
    for dtype in (torch.float16, torch.float32):
        sides = [side for family in FAMILIES for side in family_sides(family, PageShape(2, 128, 64))[::9]]
        cases[f"seal {dtype}"] = partial(seal_case, sides, dtype)
    report(cases)


if __name__ == "__main__":
    with registered():
        main()
