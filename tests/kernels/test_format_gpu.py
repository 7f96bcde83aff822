"""Page-format kernels on a GPU: bytes equal to the references'."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import FAMILIES, PageShape, Side
from qkv_engine.kernels.seal import seal, seal_reference

from .calibrated_sides import calibrated_steps
from .format_pages import HEAD_DIMS, family_sides, family_steps, lay_apart, make_blocks, sow_odd
from .subordinate_sides import all_pairs, pair_steps

pytestmark = pytest.mark.gpu

CASES = [(head_dim, torch.bfloat16) for head_dim in (6, *HEAD_DIMS)] + [(80, torch.float16), (80, torch.float32)]


def all_sides(head_dim: int, dtype: torch.dtype) -> list[Side]:
    """K and V of every format that elements of ``dtype`` can become."""
    sides = [side for family in FAMILIES for side in family_sides(family, PageShape(3, 128, head_dim), dtype)]
    return [side for side in sides if side.dense_dtype in (None, dtype)]


@pytest.mark.parametrize(("head_dim", "dtype"), CASES)
def test_seal(head_dim: int, dtype: torch.dtype) -> None:
    _seal(all_sides(head_dim, dtype), dtype)


def test_seal_subordinate_sides() -> None:
    _seal(all_pairs(PageShape(3, 128, 128)), torch.bfloat16)


def _seal(sides: list[Side], dtype: torch.dtype) -> None:
    blocks = sow_odd(make_blocks(sides, sides[0].shape, num_blocks=3, dtype=dtype, lay_out=lay_apart))
    memory = blocks.memory.cuda()
    where = blocks.source, blocks.target
    flags = seal_reference(blocks.memory, blocks.src, blocks.dst, *where, blocks.banks)
    banks = None if blocks.banks is None else blocks.banks.cuda()
    finite = seal(memory, blocks.src.cuda(), blocks.dst.cuda(), *where, banks=banks)
    assert finite.tolist() == flags.tolist()
    assert torch.equal(memory.cpu(), blocks.memory)


@pytest.mark.parametrize("head_dim", [6, *HEAD_DIMS])
def test_demote(head_dim: int) -> None:
    _demote(family_steps(all_sides(head_dim, torch.bfloat16)))


@pytest.mark.parametrize("steps_of", [calibrated_steps, pair_steps], ids=["calibrated", "subordinate"])
def test_demote_to_sides_beyond_the_registry(steps_of: Callable[[PageShape], list[tuple[Side, Side]]]) -> None:
    _demote(steps_of(PageShape(3, 128, 128)))


def _demote(steps: list[tuple[Side, Side]]) -> None:
    blocks = make_blocks([old for old, _ in steps], steps[0][0].shape, num_blocks=2, lay_out=lay_apart)
    target = lay_apart([new for _, new in steps])
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, blocks.banks)
    memory = blocks.memory.cuda()
    demote_reference(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
    demote(memory, blocks.dst.cuda(), blocks.next.cuda(), blocks.target, target)
    assert torch.equal(memory.cpu(), blocks.memory)
