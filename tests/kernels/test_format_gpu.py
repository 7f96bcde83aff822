"""Page-format kernels on a GPU: bytes equal to the references'."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.dequant import dequant_reference, dequant_side
from qkv_engine.kernels.layout import BlockLayout
from qkv_engine.kernels.seal import seal, seal_reference
from qkv_engine.kv.formats import PageShape

from .format_pages import HEAD_DIMS, all_sides, make_blocks

pytestmark = pytest.mark.gpu

BITS = (8, 4, 3, 2, 1)
CASES = [(bits, 80, torch.bfloat16) for bits in BITS]
CASES += [(4, head_dim, torch.bfloat16) for head_dim in HEAD_DIMS if head_dim != 80]
CASES += [(4, 80, torch.float16), (4, 80, torch.float32)]


@pytest.mark.parametrize(("bits", "head_dim", "dtype"), CASES)
def test_seal(bits: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = PageShape(3, 128, head_dim)
    probe = make_blocks(all_sides(bits, shape), shape, num_blocks=3, dtype=dtype)
    x = probe.x.clone()
    x[1, 0, 0, 3, 2] = float("nan")
    x[1, 1, 1, 5] = -0.0
    x[1, 2, 0, 6:8] = 60000
    x[1, 3, 0, :, 9] = 0.123
    x[1, 4, 0, 8] = 1e-7
    x[2, 5, 0, 8] = 1e-30
    blocks = make_blocks(all_sides(bits, shape), shape, num_blocks=3, dtype=dtype, x=x)
    memory = blocks.memory.cuda()
    flags = seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    finite = seal(memory, blocks.src.cuda(), blocks.dst.cuda(), blocks.source, blocks.target)
    assert finite.tolist() == flags.tolist()
    assert torch.equal(memory.cpu(), blocks.memory)
    for side, offset in zip(blocks.target.sides, blocks.target.offsets, strict=True):
        out = dequant_side(memory, blocks.dst.cuda() + offset, side, torch.float32)
        expected = dequant_reference(blocks.memory, blocks.dst + offset, side, torch.float32)
        assert torch.allclose(out.cpu(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_demote(head_dim: int) -> None:
    shape = PageShape(3, 128, head_dim)
    for old, new in ((8, 8), (8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1), (3, 3)):
        blocks = make_blocks(all_sides(old, shape), shape, num_blocks=2)
        target = BlockLayout(tuple(all_sides(new, shape)))
        seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        memory = blocks.memory.cuda()
        demote_reference(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
        demote(memory, blocks.dst.cuda(), blocks.next.cuda(), blocks.target, target)
        assert torch.equal(memory.cpu(), blocks.memory)
