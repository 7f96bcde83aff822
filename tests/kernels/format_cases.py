"""Child of ``test_format_triton``: seal, demote and dequant kernels against their references, bytes that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from qkv_engine.kernels.demote import demote_reference
from qkv_engine.kernels.demote.triton import demote_triton
from qkv_engine.kernels.dequant import dequant_reference
from qkv_engine.kernels.dequant.triton import dequant_triton
from qkv_engine.kernels.layout import BlockLayout
from qkv_engine.kernels.seal import seal_reference
from qkv_engine.kernels.seal.triton import seal_triton
from qkv_engine.kv.formats import PageShape

from .format_pages import all_sides, make_blocks, slot
from .interpreted import report

WIDTHS = {80: (8, 4, 3, 2, 1), 64: (4,), 128: (2,)}  # bits by head dim


def seal_case(bits: int, head_dim: int, dtype: torch.dtype) -> float:
    shape = PageShape(2, 128, head_dim)
    probe = make_blocks(all_sides(bits, shape), shape, dtype=dtype)
    x = probe.x.expand(2, -1, -1, -1, -1).clone()
    x[0, 0, 0, 3, 2] = float("nan")
    x[1, 1, 1, 5] = -0.0
    x[1, 2, 0, 6:8] = 60000
    x[1, 3, 0, :, 9] = 0.123
    x[1, 4, 0, 8] = 1e-7
    sides = [*all_sides(bits, shape)[1:], probe.source.sides[0]]  # a dense side among them
    blocks = make_blocks(sides, shape, num_blocks=2, dtype=dtype, x=x)
    expected = blocks.memory.clone()
    flags = seal_reference(expected, blocks.src, blocks.dst, blocks.source, blocks.target)
    finite = torch.ones_like(flags)
    seal_triton(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, finite)
    return float((blocks.memory != expected).sum() + (finite != flags).sum())


def demote_case(head_dim: int) -> float:
    shape = PageShape(2, 128, head_dim)
    steps = [(8, 8), (8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1), (3, 3)]
    source, target = (
        [side for step in steps for side in all_sides(step[i], shape)[:: 1 if head_dim == 80 else 5]] for i in (0, 1)
    )
    blocks = make_blocks(source, shape, num_blocks=2)
    layout = BlockLayout(tuple(target))
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    expected = blocks.memory.clone()
    where = blocks.dst, blocks.next, blocks.target, layout
    demote_reference(expected, *where)
    demote_triton(blocks.memory, *where)
    return float((blocks.memory != expected).sum())


def dequant_case(bits: int, head_dim: int) -> float:
    shape = PageShape(2, 128, head_dim)
    blocks = make_blocks(all_sides(bits, shape), shape, num_blocks=2)
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    worst = 0.0
    for side, offset in zip(blocks.target.sides, blocks.target.offsets, strict=True):
        out = dequant_triton(blocks.memory, blocks.dst + offset, side, torch.float32)
        expected = dequant_reference(blocks.memory, blocks.dst + offset, side, torch.float32)
        worst = max(worst, float((out - expected).abs().max()))
    return worst


def far_case() -> float:
    """Slots beyond 2^31 bytes."""
    shape = PageShape(1, 128, 64)
    small = make_blocks(all_sides(4, shape)[:2], shape)
    narrow = BlockLayout(tuple(all_sides(2, shape)[:2]))
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


def main() -> None:
    cases: dict[str, Callable[[], float]] = {"beyond 2 GiB": far_case}
    for head_dim, widths in WIDTHS.items():
        cases[f"demote D{head_dim}"] = partial(demote_case, head_dim)
        for bits in widths:
            cases[f"seal {bits} bits D{head_dim}"] = partial(seal_case, bits, head_dim, torch.bfloat16)
            cases[f"dequant {bits} bits D{head_dim}"] = partial(dequant_case, bits, head_dim)
    for dtype in (torch.float16, torch.float32):
        cases[f"seal 4 bits D64 {dtype}"] = partial(seal_case, 4, 64, dtype)
    report(cases)


if __name__ == "__main__":
    main()
