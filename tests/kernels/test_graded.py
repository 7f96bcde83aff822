"""Graded sides: names, sizes, bytes, ways down the ladder, means, and device functions (interpreter, compiled)."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import FAMILIES, BlockLayout, PageShape, SideBytes, check_step, make_format
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.graded import GRADED, ChannelRun, Graded, GradedSide
from qkv_engine.kernels.formats.graded import reference as graded
from qkv_engine.kernels.formats.uniform import Uniform
from qkv_engine.kernels.formats.uniform import reference as uniform
from qkv_engine.kernels.seal import seal, seal_reference

from .format_pages import make_blocks, sow_odd
from .interpreted import run_cases

BF16 = torch.bfloat16
SPECTRAL = "graded-16x4-48x2"
PAGE = Path(__file__).parents[2] / "docs/schemes/spectral.md"
both_sides = pytest.mark.parametrize("side_name", ["k", "v"])


def side_of(name: str, head_dim: int = 128, heads: int = 2, side_name: SideName = "k") -> GradedSide:
    side = make_format(name, BF16).layout(PageShape(heads, 128, head_dim), side_name)
    assert isinstance(side, GradedSide)
    return side


def coefficients(head_dim: int = 128, blocks: int = 3, heads: int = 2, seed: int = 0) -> Tensor:
    """Channels of falling spread around means of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, heads, 128, head_dim, generator=generator) * torch.logspace(1, -2, head_dim)
    return x + torch.randn(heads, 1, head_dim, generator=generator)


def equal(a: SideBytes, b: SideBytes) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.meta, b.meta)


def unwritten(rows: SideBytes) -> SideBytes:
    return SideBytes(torch.full_like(rows.codes, 255), torch.full_like(rows.meta, 255))


# ---- names


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        (SPECTRAL, [(16, 4), (48, 2)]),
        ("graded-128x8", [(128, 8)]),
        ("graded-16x8-16x4-16x2-16x1", [(16, 8), (16, 4), (16, 2), (16, 1)]),
        ("graded-1024x1", [(1024, 1)]),
    ],
)
def test_names_are_runs(name: str, runs: list[tuple[int, int]]) -> None:
    fmt = make_format(name, BF16)
    assert fmt == Graded(tuple(ChannelRun(*run) for run in runs)) and fmt.name == name


@pytest.mark.parametrize(
    "name",
    [
        "graded",
        "graded-",
        "graded-0",
        "graded-0x4",
        "graded-16x3",
        "graded-16x4-",
        "graded-016x4",
        "graded-16x2-16x4",
        "graded-16x4-16x4",
        "graded-24x4",
        "graded-16x4-40x2",
        "graded-16X4",
        "graded-²x4",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"format='{name}'.*runs such as 16x4-48x2"):
        make_format(name, BF16)


def test_no_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"format='graded-0': not runs.*runs such as"):
        Graded(())


def test_heads_it_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'graded-16x4-48x2': has codes of 64 channels, the head has 56.*most 48"):
        side_of(SPECTRAL, head_dim=56)
    with pytest.raises(ConfigError, match=r"head dim that 8 divides.*uniform"):
        side_of(SPECTRAL, head_dim=100)


# ---- bytes


@both_sides
def test_sizes_of_a_head(side_name: SideName) -> None:
    """1,024 and 1,536 bytes of codes; 64 pairs and 64 means."""
    side = side_of(SPECTRAL, heads=8, side_name=side_name)
    assert (side.head_codes_nbytes, side.head_meta_nbytes, side.top_offset) == (2560, 384, 3072)
    rows = graded.quantize(coefficients(heads=8), side)
    assert (rows.codes.shape[1], rows.meta.shape[1]) == (side.codes_nbytes, side.meta_nbytes) == (8 * 2560, 3072 + 16)
    assert [part.shape[-1] for part in graded.code_sets(rows, side)] == [1024, 1536]
    assert [part.shape[-1] for part in (graded.pairs(rows, side), graded.means(rows, side))] == [64, 64]


def table() -> list[tuple[str, float, float, int]]:
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    return [(name, float(codes), float(bits), int(nbytes.replace(",", ""))) for name, codes, bits, nbytes in rows]


def test_the_page_has_the_bytes_of_its_layouts() -> None:
    found = table()
    assert len(found) > 5
    for name, codes, bits, nbytes in found:
        k, v = (make_format(name, BF16).layout(PageShape(8, 128, 128), side) for side in ("k", "v"))
        elements = 2 * 8 * 128 * 128
        assert codes == 8 * (k.codes_nbytes + v.codes_nbytes) / elements
        assert bits == pytest.approx(8 * (k.nbytes + v.nbytes) / elements, abs=5e-4)
        assert nbytes * 128 == k.nbytes + v.nbytes


def test_golden_bytes_of_k() -> None:
    """Codes 13 and 6 of tokens 64 apart, then a mean of 1 + 15 * 28 / (15 * 128) = 1.21875."""
    side = side_of("graded-16x4", head_dim=24, heads=1)
    x = torch.zeros(1, 1, 128, 24)
    x[0, 0, 2, 3], x[0, 0, 5, 3], x[0, 0, 69, 3] = 15, 13, 6
    x[0, 0, :, 21] = 1
    x[0, 0, [9, 77], 21] += torch.tensor([15.0, 13.0])
    rows = graded.quantize(x, side)
    codes = rows.codes.view(64, 16)
    assert codes[5, 3] == 0x6D and codes[2, 3] == 0x0F and codes.count_nonzero() == 2
    meta = rows.meta.view(torch.float16)[0]
    assert meta.nonzero().flatten().tolist() == [16 + 3, 32 + 21 - 16, 40]
    assert meta[[16 + 3, 32 + 21 - 16, 40]].tolist() == [15, 1.21875, 15]
    assert rows.meta[0, 2 * 37 :][:2].tolist() == [0xE0, 0x3C]


def test_golden_bytes_of_v() -> None:
    """Codes 3, 1, 2, 0 of tokens 32 apart; in the 1-bit run channels 2 and 10 share a byte."""
    side = side_of("graded-16x2-16x1", head_dim=32, heads=1, side_name="v")
    x = torch.zeros(1, 1, 128, 32)
    x[0, 0, [5, 37, 69], 3] = torch.tensor([3.0, 1.0, 2.0])
    x[0, 0, [5, 69], 16 + 2] = 1
    x[0, 0, 37, 16 + 10] = 1
    rows = graded.quantize(x, side)
    two, one = rows.codes[0, :512].view(16, 32), rows.codes[0, 512:].view(8, 32)
    assert two[3, 5] == 0x27 and two.count_nonzero() == 1
    assert one[2, 5] == 0x25 and one.count_nonzero() == 1
    found = graded.dequantize(rows, side)[0, 0]
    torch.testing.assert_close(found[[5, 37], 18], torch.tensor([0.8, 0.2]))
    torch.testing.assert_close(found[[5, 37], 3], torch.tensor([3.0, 1.0]))


@both_sides
@pytest.mark.parametrize("bits", [8, 4])
def test_one_run_of_all_channels_has_the_bytes_of_a_uniform_side(bits: int, side_name: SideName) -> None:
    x, side = coefficients(), side_of(f"graded-128x{bits}", side_name=side_name)
    assert equal(graded.quantize(x, side), uniform.quantize(x, side.uniform(bits)))


@both_sides
def test_a_run_has_the_values_of_a_uniform_side(side_name: SideName) -> None:
    x, side = coefficients(96), side_of("graded-16x8-16x4-16x2-16x1", 96, side_name=side_name)
    found, first = graded.dequantize(graded.quantize(x, side), side), 0
    for bits in ("8-channel-128", "4-channel-128", "2-channel-128", "1-channel-128-eta0.2"):
        part = slice(first, first + 16)
        twin = make_format(f"int{bits}", BF16).layout(PageShape(2, 128, 16), side_name)
        torch.testing.assert_close(
            found[..., part], twin.family.dequantize(twin.family.quantize(x[..., part], twin), twin)
        )
        first += 16


def test_means_are_within_half_a_level() -> None:
    x, side = coefficients(), side_of(SPECTRAL)
    means = graded.means(graded.quantize(x, side), side).float()
    spans = uniform.read_meta(uniform.quantize(x, side.uniform(4)), side.uniform(4))[1, :, :, 0, 64:].float()
    assert ((means - x[..., 64:].mean(2)).abs() <= spans / 30 + 1e-3).all()


# ---- ways down


@both_sides
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", [SPECTRAL, "graded-16x8-16x4-16x2-16x1", "graded-48x1", "graded-64x4", "graded-16x2"])
def test_every_way_down_leads_to_the_same_bytes(name: str, head_dim: int, side_name: SideName) -> None:
    x, side = coefficients(head_dim), side_of(name, head_dim, side_name=side_name)
    direct, eight, four = graded.quantize(x, side), side.uniform(8), side.uniform(4)
    wide = uniform.quantize(x, eight)
    ways = [(eight, wide)]
    if side.runs[0].bits <= 4:
        ways += [(four, uniform.demote(wide, eight, four)), (four, uniform.quantize(x, four))]
    for old, rows in ways:
        out = unwritten(direct)
        GRADED.cpu.demote(rows, out, old, side)
        assert equal(out, direct) and equal(graded.demote(rows, old, side), direct)
    out = unwritten(direct)
    assert GRADED.cpu.seal(x, out, side) and equal(out, direct)


def test_steps_that_do_not_exist_are_refused() -> None:
    new, shape = side_of(SPECTRAL), PageShape(2, 128, 128)
    for bits in (8, 4):
        check_step(Uniform(bits, "channel", 128).layout(shape, "k"), new)
    others = [Uniform(bits, "channel", 128) for bits in (3, 2, 1)]
    others += [Uniform(4, "channel", 64), Uniform(4, "token", 128)]
    for old in [
        *(fmt.layout(shape, "k") for fmt in others),
        side_of("graded-128x4"),
        Uniform(4, "channel", 128).layout(shape, "v"),
    ]:
        with pytest.raises(ValueError, match="per channel alone, of 8 or 4 bits in groups of 128"):
            check_step(old, new)
    check_step(new.uniform(8), side_of("graded-16x8-16x2"))
    with pytest.raises(ValueError, match="from 4 to 8 bits"):
        check_step(new.uniform(4), side_of("graded-16x8-16x2"))
    with pytest.raises(ValueError, match="from graded to uniform"):
        check_step(new, new.uniform(1))
    assert GRADED in FAMILIES


# ---- back ends


def test_more_codes_never_mean_more_error() -> None:
    x, errors = coefficients(), []
    for name in ("16x1", "16x2", "16x4", "16x4-16x1", "16x4-48x2", "16x8-48x4", "64x8", "64x8-64x2", "128x8"):
        side = side_of(f"graded-{name}")
        errors.append(float((graded.dequantize(graded.quantize(x, side), side) - x).norm()))
    assert all(a > b for a, b in pairwise(errors))


def test_every_rung_of_a_ladder_has_integer_functions() -> None:
    pytest.importorskip("triton")
    shape = PageShape(8, 128, 128)
    for name in ("int8-channel-128", "int4-channel-128", SPECTRAL, "graded-48x1"):
        for side_name in ("k", "v"):
            side = make_format(name, BF16).layout(shape, side_name)
            assert side.family.triton().integer(side) is not None
    assert (
        side_of(SPECTRAL).family.triton().integer(GradedSide("v", PageShape(8, 256, 128), side_of(SPECTRAL).runs))
        is None
    )


@pytest.mark.parametrize(
    ("module", "least"), [("graded_cases", 46), pytest.param("graded_96_cases", 6, marks=pytest.mark.slow)]
)
def test_device_functions(module: str, least: int) -> None:
    pytest.importorskip("triton")
    figures = run_cases(Path(__file__).with_name(f"{module}.py"))
    limits = {"seal": 0.0, "demote": 0.0, "tile": 1e-5, "decode": 5e-4}
    wrong = {name: figure for name, figure in figures.items() if not figure <= limits[name.split()[0]]}
    assert len(figures) >= least and not wrong


@pytest.mark.parametrize(
    ("name", "head_dim", "registers"),
    [
        pytest.param(SPECTRAL, 80, 144, marks=pytest.mark.slow),
        (SPECTRAL, 128, 168),  # as many as Kitty's: twelve programs a multiprocessor
        pytest.param("graded-16x4-112x1", 128, 192, marks=pytest.mark.slow),
        pytest.param("graded-16x8-16x4-16x2-16x1", 128, 192, marks=pytest.mark.slow),
        pytest.param("int4-channel-128", 128, 168, marks=pytest.mark.slow),
        pytest.param("int8-channel-128", 128, 168, marks=pytest.mark.slow),
    ],
)
def test_a_page_is_fetched_ahead_and_nothing_spills(name: str, head_dim: int, registers: int) -> None:
    pytest.importorskip("triton")
    built, found = compiled_decode(name, head_dim, 90)
    # Of 8 bits two stages hold a page, whose address is not fetched ahead.
    assert name.startswith("int8") or "tt.load" not in built.asm["ttgir"].split("scf.for", 1)[1]
    assert found["spilled"] == 0 and found["registers"] <= registers


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)]
)
def test_decode_compiles_without_spills(capability: int) -> None:
    pytest.importorskip("triton")
    assert compiled_decode(SPECTRAL, 128, capability)[1]["spilled"] == 0


@both_sides
def test_seals_and_demotions_compile_without_spills(side_name: SideName) -> None:
    pytest.importorskip("triton")
    from qkv_engine.kernels.demote.triton import demote_kernel, demote_variant
    from qkv_engine.kernels.formats.dense import DenseSide
    from qkv_engine.kernels.paged_decode.triton import Tuning
    from qkv_engine.kernels.seal.triton import seal_kernel, seal_variant
    from studies.kernels.compiled import compile_kernel, describe

    new = side_of(SPECTRAL, heads=8, side_name=side_name)
    options, warps = seal_variant(DenseSide(side_name, new.shape, BF16), new)
    options |= {"banks_ptr": None, "bank_steps_ptr": None, "windows_ptr": None}
    built = [compile_kernel(seal_kernel, options, Tuning(warps, 3))]
    built += [compile_kernel(demote_kernel, demote_variant(new.uniform(bits), new), Tuning(8, 3)) for bits in (8, 4)]
    assert [describe(each)["spilled"] for each in built] == [0, 0, 0]


def compiled_decode(name: str, head_dim: int, capability: int) -> tuple[Any, dict[str, Any]]:
    """The decode kernel for K and V in a format, as it is launched, and what ``describe`` says of it."""
    from qkv_engine.kernels.paged_decode.triton import NO_BANKS, decode_variant
    from studies.kernels.compiled import compile_kernel, describe
    from studies.kernels.inputs import named_page

    kernel, options, tuning = decode_variant(named_page(name, name, 8, head_dim), 4, sink_tokens=32)
    options = {**options, **NO_BANKS, "OVERLAP": capability >= 90}
    built = compile_kernel(kernel, options, tuning, capability)
    return built, describe(built)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [80, 128, *(pytest.param(d, marks=pytest.mark.slow) for d in (64, 96, 256))])
def test_bytes_on_a_gpu(head_dim: int) -> None:
    """Of every layout, sealed and stepped down, beside the references."""
    from .graded_cases import graded_sides, steps

    sides = graded_sides(head_dim)
    pairs = steps(sides)
    blocks = sow_odd(make_blocks([*(old for old, _ in pairs), *sides], sides[0].shape))
    target = BlockLayout.stack([*(new for _, new in pairs), *sides])
    memory, where = blocks.memory.cuda(), [address.cuda() for address in (blocks.src, blocks.dst, blocks.next)]
    seal(memory, *where[:2], blocks.source, blocks.target)
    demote(memory, *where[1:], blocks.target, target)
    seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
    demote_reference(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
    assert torch.equal(memory.cpu(), blocks.memory)
