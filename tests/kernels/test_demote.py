"""Demotion: the shift for every code, nesting with direct sealing, metadata kept, steps in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import BlockLayout, PageShape
from qkv_engine.kernels.formats.uniform import Uniform, UniformSide
from qkv_engine.kernels.formats.uniform.reference import read_meta, shrink
from qkv_engine.kernels.seal import seal

from .format_pages import HEAD_DIMS, all_sides, lay_apart, make_blocks, side_rows, slot

STEPS = [(8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1)]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_shift_is_the_nearest_quotient_for_every_code(bits: int) -> None:
    wide, divisor = 2 * bits, 2**bits + 1
    codes = torch.arange(2**wide, dtype=torch.int64)
    narrow = shrink(codes, wide, bits)
    assert torch.equal(narrow, (codes.double() / divisor).round().long())
    assert torch.equal(narrow, (codes + 2 ** (bits - 1)) // divisor)
    assert narrow[0] == 0 and narrow[-1] == 2**bits - 1
    assert (narrow.diff() >= 0).all()
    count = torch.bincount(narrow)
    assert (count[1:-1] == divisor).all() and count[0] == count[-1] == 2 ** (bits - 1) + 1


def test_golden_thresholds() -> None:
    assert shrink(torch.arange(16), 4, 2).tolist() == [0] * 3 + [1] * 5 + [2] * 5 + [3] * 3
    rises = (shrink(torch.arange(256), 8, 4).diff() == 1).nonzero().flatten() + 1
    assert rises.tolist() == [17 * k - 8 for k in range(1, 16)]


@pytest.mark.parametrize("lay_out", [BlockLayout.stack, lay_apart])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_demotion_gives_the_bytes_of_direct_sealing(head_dim: int, lay_out: Callable) -> None:
    shape = PageShape(2, 128, head_dim)
    sealed, layouts = {}, {}
    for bits in (8, 4, 2, 1):
        blocks = make_blocks(all_sides(bits, shape), shape, lay_out=lay_out)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        sealed[bits] = slot(blocks.memory, blocks.dst[0], blocks.target).clone()
        layouts[bits] = blocks.target
    for wide, narrow in STEPS:
        source, target = layouts[wide], layouts[narrow]
        for function in (demote, demote_reference):
            memory = torch.full((source.nbytes + target.nbytes + 64,), 255, dtype=torch.uint8)
            memory[16 : 16 + source.nbytes] = sealed[wide]
            at = torch.tensor([16]), torch.tensor([32 + source.nbytes])
            function(memory, *at, source, target)
            assert torch.equal(slot(memory, at[1], target), sealed[narrow])
            assert torch.equal(slot(memory, at[0], source), sealed[wide])
            assert (memory[32 + source.nbytes + target.nbytes :] == 255).all()


def test_metadata_is_kept_and_endpoints_do_not_move() -> None:
    shape = PageShape(2, 128, 96)
    for wide, narrow in STEPS:
        blocks = make_blocks(all_sides(wide, shape), shape)
        target = BlockLayout.stack(all_sides(narrow, shape))
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        demote(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
        for i, (old, new) in enumerate(zip(blocks.target.sides, target.sides, strict=True)):
            assert isinstance(old, UniformSide) and isinstance(new, UniformSide)
            before = side_rows(blocks.memory, blocks.dst, blocks.target, i)
            after = side_rows(blocks.memory, blocks.next, target, i)
            assert torch.equal(read_meta(before, old), read_meta(after, new))
            x, y = old.family.dequantize(before, old), new.family.dequantize(after, new)
            assert torch.allclose(x.amax((2, 3)), y.amax((2, 3)), rtol=1e-5, atol=1e-6)


def test_order_and_company_do_not_matter() -> None:
    """Blocks demoted together in one step or alone in several end on the same bytes."""
    shape = PageShape(2, 128, 80)
    blocks = make_blocks(all_sides(8, shape), shape, num_blocks=3)
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    middle, last = (BlockLayout.stack(all_sides(bits, shape)) for bits in (4, 2))
    together = blocks.memory.clone()
    demote(together, blocks.dst, blocks.next, blocks.target, last)
    for i in (2, 0, 1):
        one = slice(i, i + 1)
        demote(blocks.memory, blocks.dst[one], blocks.src[one], blocks.target, middle)
        demote(blocks.memory, blocks.src[one], blocks.next[one], middle, last)
        here, there = (slot(m, blocks.next[i], last) for m in (blocks.memory, together))
        assert torch.equal(here, there)


def test_a_side_that_keeps_its_format_is_copied() -> None:
    shape = PageShape(2, 128, 64)
    for bits in (8, 4, 3, 2, 1):
        blocks = make_blocks(all_sides(bits, shape), shape)
        seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        demote(blocks.memory, blocks.dst, blocks.next, blocks.target, blocks.target)
        here, there = (slot(blocks.memory, a, blocks.target) for a in (blocks.dst, blocks.next))
        assert torch.equal(here, there)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Uniform(4, "token", 64), Uniform(8, "token", 64)),
        (Uniform(8, "token", 64), Uniform(3, "token", 64)),
        (Uniform(3, "token", 64), Uniform(2, "token", 64)),
        (Uniform(8, "token", 64), Uniform(4, "channel", 64)),
        (Uniform(8, "token", 64), Uniform(4, "token", 32)),
    ],
)
def test_what_is_no_demotion_is_refused(old: Uniform, new: Uniform) -> None:
    shape = PageShape(1, 128, 64)
    source, target = (BlockLayout.stack([fmt.layout(shape, "k")]) for fmt in (old, new))
    nowhere = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError):
        demote(torch.zeros(64, dtype=torch.uint8), nowhere, nowhere, source, target)
