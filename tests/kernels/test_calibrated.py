"""Calibrated uniform sides: names, levels, and all operations; seals and demotions do not know eta."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.block_attention import block_attention, block_attention_reference
from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.dequant import dequant, dequant_reference
from qkv_engine.kernels.formats import PageShape, check_step, make_format
from qkv_engine.kernels.formats.uniform.layout import AXES, BITS, Uniform
from qkv_engine.kernels.seal import seal

from .calibrated_sides import calibrated_sides, calibrated_steps
from .common import relative_error
from .format_pages import lay_apart, make_blocks, side_rows
from .interpreted import run_cases

SHAPE = PageShape(2, 128, 80)


@pytest.mark.parametrize(
    ("name", "eta", "spelled"),
    [
        ("int1-channel-128-eta1/6", Fraction(1, 6), "int1-channel-128-eta1/6"),
        ("int2-token-32-eta0.045", Fraction(9, 200), "int2-token-32-eta0.045"),
        ("int2-token-32-eta45/999", Fraction(5, 111), "int2-token-32-eta5/111"),
        ("int2-token-32-eta1/4", Fraction(1, 4), "int2-token-32-eta0.25"),
        ("int8-token-64-eta0.000001", Fraction(1, 10**6), "int8-token-64-eta0.000001"),
        ("int2-token-64-eta0.0", Fraction(0), "int2-token-64"),
    ],
)
def test_names_are_exact(name: str, eta: Fraction, spelled: str) -> None:
    fmt = make_format(name, torch.bfloat16)
    assert isinstance(fmt, Uniform) and fmt.eta == eta and fmt.name == spelled
    assert make_format(spelled, torch.bfloat16) == fmt


@pytest.mark.parametrize(
    "eta", ["0.5", "1/2", "2/3", "9.0", "1/0", "-0.1", "", ".1", "0.1234567", "1e-2", "nan", "٠.1"]
)
def test_other_etas_are_refused(eta: str) -> None:
    with pytest.raises(ConfigError, match=r"eta=.*less than 1/2"):
        make_format(f"int2-token-64-eta{eta}", torch.bfloat16)


def test_an_eta_of_an_unknown_format_is_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="unknown KV format"):
        make_format("int5-token-64-eta0.1", torch.bfloat16)


@pytest.mark.parametrize(
    ("bits", "eta", "levels"),
    [
        (1, Fraction(1, 6), [1 / 6, 5 / 6]),
        (2, Fraction("0.045"), [0.135, 1.045, 1.955, 2.865]),
        (2, Fraction("0.09"), [0.27, 1.09, 1.91, 2.73]),
    ],
)
@pytest.mark.parametrize("axis", AXES)
def test_golden_levels(axis: str, bits: int, eta: Fraction, levels: list[float]) -> None:
    """In steps of the uncalibrated levels, whose codes a group of all levels gets."""
    side = Uniform(bits, axis, 32, eta).layout(PageShape(1, 128, 32), "v")
    steps = torch.arange(32.0) % 2**bits
    x = steps.expand(1, 1, 128, 32) if axis == "token" else steps.repeat(4)[:, None].expand(1, 1, 128, 32)
    out = side.family.dequantize(side.family.quantize(x, side), side)
    assert torch.allclose(out, torch.tensor(levels)[x.long()], atol=1e-6)


def test_another_eta_is_another_side_with_the_same_bytes() -> None:
    x = torch.randn(1, 2, 128, 80, generator=torch.Generator().manual_seed(0))
    for side in calibrated_sides(SHAPE):
        plain = replace(side, eta=Fraction(0))
        assert plain != side and plain.spec != side.spec
        rows, expected = (s.family.quantize(x, s) for s in (side, plain))
        assert torch.equal(rows.codes, expected.codes) and torch.equal(rows.meta, expected.meta)
        assert not torch.equal(side.family.dequantize(rows, side), side.family.dequantize(rows, plain))


def test_cpu_equals_the_reference() -> None:
    blocks = make_blocks(calibrated_sides(SHAPE), SHAPE, num_blocks=2, lay_out=lay_apart)
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    q = torch.randn(2, 2, 3, 80, generator=torch.Generator().manual_seed(1))
    assert len(blocks.target.pages) == len(BITS) * len(AXES) * 3
    for page in blocks.target.pages:
        where = blocks.memory, blocks.dst, page
        for out, expected in zip(dequant(*where, torch.float32), dequant_reference(*where), strict=True):
            assert relative_error(out, expected) <= 1e-6
        out, lse = block_attention(q, *where, 0.1)
        expected, expected_lse = block_attention_reference(q, *where, 0.1)
        assert relative_error(out, expected) <= 2e-5 and (lse - expected_lse).abs().max() <= 1e-4


def test_demotions_do_not_know_eta() -> None:
    steps = calibrated_steps(SHAPE)
    blocks, target = make_blocks([old for old, _ in steps], SHAPE), lay_apart([new for _, new in steps])
    plain = lay_apart([replace(new, eta=Fraction(0)) for _, new in steps])
    seal(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    found = []
    for function, layout in ((demote, target), (demote_reference, target), (demote_reference, plain)):
        memory = torch.cat([blocks.memory, torch.full((layout.nbytes + 16,), 255, dtype=torch.uint8)])
        at = torch.tensor([-(-len(blocks.memory) // 16) * 16])
        function(memory, blocks.dst, at, blocks.target, layout)
        found.append([part for i in range(len(steps)) for part in side_rows(memory, at, layout, i)[:2]])
    for cpu, reference, expected in zip(*found, strict=True):
        assert torch.equal(cpu, reference) and torch.equal(cpu, expected)


def test_steps_that_stay_refused() -> None:
    wide, narrow = (Uniform(bits, "token", 64, Fraction(1, 9)).layout(SHAPE, "v") for bits in (8, 4))
    check_step(wide, narrow)
    with pytest.raises(ValueError, match="from 4 to 8 bits"):
        check_step(narrow, replace(wide, eta=Fraction(0)))


def test_triton_equals_the_references() -> None:
    pytest.importorskip("triton")
    from . import calibrated_cases

    figures = run_cases(calibrated_cases.__file__)
    wrong = {
        case: figure
        for case, figure in figures.items()
        if isinstance(figure, str) or figure > (1e-5 if case.startswith("tile") else 0)
    }
    assert len(figures) == 6 and not wrong
