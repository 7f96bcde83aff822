"""Conformance of every registered family: sizes, round trip, CPU and Triton operations against its references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import FAMILIES, Family, PageShape, Side, SideBytes, make_format
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.graded import GradedSide
from qkv_engine.kernels.formats.rows import page_rows
from qkv_engine.kernels.seal import seal, seal_reference

from ..toy_format import SIGN
from ..toy_format.registered import registered
from .common import relative_error
from .format_pages import (
    Blocks,
    family_sides,
    family_steps,
    format_sides,
    lay_apart,
    make_blocks,
    slot,
    sow_odd,
    written,
)
from .interpreted import run_cases

families = pytest.mark.parametrize("family", [*FAMILIES, SIGN], ids=lambda family: family.name)
head_dims = pytest.mark.parametrize("head_dim", [64, 80])


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    with registered():
        yield


def sides_of(family: Family, head_dim: int) -> list[Side]:
    """K and V of every format of a family that elements in float32 can become, in turns."""
    sides = family_sides(family, PageShape(2, 128, head_dim), torch.float32)
    return [side for side in sides if side.dense_dtype in (None, torch.float32)]


def make(sides: list[Side], x: Tensor | None = None) -> Blocks:
    return make_blocks(sides, sides[0].shape, num_blocks=2, dtype=torch.float32, lay_out=lay_apart, x=x)


def sealed(family: Family, head_dim: int) -> Blocks:
    """Two blocks with every side of a family, sealed by its reference."""
    blocks = make(sides_of(family, head_dim))
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, blocks.banks)
    return blocks


def quantized(x: Tensor, side: Side) -> SideBytes:
    """The bytes of ``x``, under patterns of zeros."""
    bank = torch.zeros(len(x), side.bank_nbytes, dtype=torch.uint8)
    return side.family.quantize(x, side, bank)._replace(bank=bank)


def coded_channels(side: Side) -> int:
    """Channels that have codes."""
    return side.coded if isinstance(side, GradedSide) else side.shape.head_dim


def side_views(blocks: Blocks) -> list[tuple[Side, SideBytes]]:
    """All sides of the two blocks at ``dst``, read in place."""
    first, second = sorted(blocks.dst.tolist())
    found = []
    for page in blocks.target.pages:
        banks = blocks.banks
        k, v = page_rows(blocks.memory, range(first, second + 1, second - first), page, banks)
        found += [(page.k, k), (page.v, v)]
    return found


@families
def test_presets_and_candidates_have_the_familys_formats(family: Family) -> None:
    for kv in family.presets:
        sides = [(side, name) for side in ("k", "v") for name in kv.rungs[-1].formats(side, 8)]
        assert family in {family_of(name, side) for side, name in sides}
    assert all(family_of(name, side) is family for side in ("k", "v") for name in getattr(family.candidates, side))


def family_of(name: str, side: SideName) -> Family:
    return make_format(name, torch.bfloat16).layout(PageShape(2, 128, 128), side).family


@families
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_sizes(family: Family, num_kv_heads: int, head_dim: int) -> None:
    shape = PageShape(num_kv_heads, 128, head_dim)
    for name, fmt in family.formats(torch.bfloat16).items():
        for side in format_sides(fmt, shape):
            assert fmt.name == name and side.family is family and side.shape == shape
            assert side.codes_nbytes * 8 == num_kv_heads * 128 * coded_channels(side) * fmt.bits
            assert side.codes_nbytes % 16 == side.meta_nbytes % 2 == side.nbytes % 128 == 0
            assert 0 <= side.nbytes - side.codes_nbytes - side.meta_nbytes < 128


@families
def test_layouts_and_their_records_are_equal_and_hashable(family: Family) -> None:
    pytest.importorskip("triton")
    for side, twin in zip(sides_of(family, 64), sides_of(family, 64), strict=True):
        assert {side: side.spec} == {twin: twin.spec} and hash(side.spec) == hash(twin.spec)


@families
@head_dims
def test_round_trip_within_a_step(family: Family, head_dim: int) -> None:
    """A step is the range of the side's elements over the number of levels less one."""
    shape = PageShape(2, 128, head_dim)
    x = torch.randn(1, 2, 128, head_dim, generator=torch.Generator().manual_seed(head_dim))
    for fmt in family.formats(torch.float32).values():
        for side in format_sides(fmt, shape):
            error = (family.dequantize(quantized(x, side), side) - x).abs().max()
            bits = 8 if side.dense_dtype == torch.bfloat16 else fmt.bits  # of its mantissa
            bits = 1 if isinstance(side, GradedSide) else bits  # of its last channels, or none
            assert error <= (x.max() - x.min()) / (2**bits - 1)


@families
@head_dims
def test_cpu_seal_equals_the_reference(family: Family, head_dim: int) -> None:
    blocks = sow_odd(make(sides_of(family, head_dim)))
    expected, where = blocks.memory.clone(), (blocks.src, blocks.dst, blocks.source, blocks.target)
    mask = blocks.memory != 255
    for address in blocks.dst:
        slot(mask, address, blocks.target)[:] = written(blocks.target)
    if blocks.banks is not None:
        mask[int(blocks.banks[0]) :][: blocks.target.bank_nbytes] = True
    flags = seal(blocks.memory, *where, banks=blocks.banks)
    assert torch.equal(flags, seal_reference(expected, *where, blocks.banks))
    assert torch.equal(blocks.memory, expected) and (blocks.memory[~mask] == 255).all()


@families
@head_dims
def test_cpu_demotions_equal_the_reference(family: Family, head_dim: int) -> None:
    steps = family_steps(sides_of(family, head_dim))
    if not steps:
        pytest.skip("sides of this family never step down")
    blocks, target = make([old for old, _ in steps]), lay_apart([new for _, new in steps])
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target, blocks.banks)
    expected, where = blocks.memory.clone(), (blocks.dst, blocks.next, blocks.target, target)
    demote(blocks.memory, *where)
    demote_reference(expected, *where)
    assert torch.equal(blocks.memory, expected)


@families
def test_the_order_of_steps_does_not_matter(family: Family) -> None:
    x = torch.randn(1, 2, 128, 64, generator=torch.Generator().manual_seed(1))
    steps = family_steps(sides_of(family, 64))
    for old, middle in steps:
        wide = quantized(x, old)
        for new in [new for side, new in steps if side == middle]:
            if old == middle or middle == new:
                continue
            slow = new.family.demote(middle.family.demote(wide, old, middle), middle, new)
            quick = new.family.demote(wide, old, new)
            assert torch.equal(slow.codes, quick.codes) and torch.equal(slow.meta, quick.meta)


@families
@head_dims
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_dequantize_equals_the_reference(family: Family, head_dim: int, dtype: torch.dtype) -> None:
    for side, rows in side_views(sealed(family, head_dim)):
        out = side.family.cpu.dequantize(rows, side, dtype)
        assert out.dtype == dtype and out.shape == (2, 2, 128, head_dim)
        assert relative_error(out, family.dequantize(rows, side)) <= (1e-5 if dtype == torch.float32 else 4e-3)


@families
@head_dims
def test_cpu_products_equal_the_reference(family: Family, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 2, 3, head_dim, generator=generator)
    p = torch.rand(2, 2, 3, 128, generator=generator)
    for side, rows in side_views(sealed(family, head_dim)):
        x = family.dequantize(rows, side)
        if side.name == "k":
            assert relative_error(side.family.cpu.scores(q, rows, side), q @ x.mT) <= 1e-5
        else:
            assert relative_error(side.family.cpu.values(p, rows, side), p @ x) <= 1e-5


def test_triton_operations_equal_the_references() -> None:
    pytest.importorskip("triton")
    figures = run_cases(str(Path(__file__).with_name("format_cases.py")))
    wrong = {
        case: figure
        for case, figure in figures.items()
        if isinstance(figure, str) or figure > (1e-5 if case.startswith("tile") else 0)
    }
    assert not wrong
    assert {case.split()[0] for case in figures} >= {"seal", "demote", "tile", "beyond"}
    assert all(any(family.name in case for case in figures) for family in FAMILIES)
