"""Page-format kernels on a GPU: bytes equal to the references'.

Each side and each step is a kernel of its own, which is compiled first. So all of them run for one head dim, and for
each other one a share, the next one in turn; the rest is slow.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import FAMILIES, PageShape, Side
from qkv_engine.kernels.seal import seal, seal_reference

from .calibrated_sides import calibrated_steps
from .format_pages import HEAD_DIMS, family_sides, family_steps, lay_apart, make_blocks, sow_odd
from .subordinate_sides import all_pairs, pair_steps

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CASES = [(80, BF16), *((d, BF16) for d in (6, *HEAD_DIMS) if d != 80), (80, torch.float16), (80, torch.float32)]
SHARES = 4  # of a head dim's sides; so many make a case


def shares(cases: list[tuple[int, torch.dtype]]) -> list[ParameterSet]:
    """The cases with the number of each share, slow unless all or that one run."""
    return [
        pytest.param(*case, share, marks=[pytest.mark.slow] if number and share != number % SHARES else [])
        for number, case in enumerate(cases)
        for share in range(SHARES)
    ]


def all_sides(head_dim: int, dtype: torch.dtype) -> list[Side]:
    """K and V of every format that elements of ``dtype`` can become."""
    sides = [side for family in FAMILIES for side in family_sides(family, PageShape(3, 128, head_dim), dtype)]
    return [side for side in sides if side.dense_dtype in (None, dtype)]


@pytest.mark.parametrize(("head_dim", "dtype", "share"), shares(CASES))
def test_seal(head_dim: int, dtype: torch.dtype, share: int) -> None:
    _seal(all_sides(head_dim, dtype)[share::SHARES], dtype)


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


@pytest.mark.parametrize(("head_dim", "dtype", "share"), shares([case for case in CASES if case[1] == BF16]))
def test_demote(head_dim: int, dtype: torch.dtype, share: int) -> None:
    _demote(family_steps(all_sides(head_dim, dtype))[share::SHARES])


@pytest.mark.slow
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
