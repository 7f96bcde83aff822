"""Kitty sides: names, sizes, what is boosted, paths down the ladder, and device functions under the interpreter."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.demote import demote, demote_reference
from qkv_engine.kernels.formats import (
    FAMILIES,
    BlockLayout,
    PageShape,
    SideBytes,
    check_step,
    make_format,
    narrower_formats,
)
from qkv_engine.kernels.formats.kitty import KITTY, Kitty, KittySide, Ranking
from qkv_engine.kernels.formats.kitty import reference as kitty
from qkv_engine.kernels.formats.uniform import Uniform, UniformSide
from qkv_engine.kernels.formats.uniform import reference as uniform
from qkv_engine.kernels.seal import seal, seal_reference

from .format_pages import make_blocks, sow_odd
from .interpreted import run_cases

BF16 = torch.bfloat16
RANKINGS = ("", "-variance", "-random")


def side_of(name: str, head_dim: int = 128, heads: int = 2) -> KittySide:
    side = make_format(name, BF16).layout(PageShape(heads, 128, head_dim), "k")
    assert isinstance(side, KittySide)
    return side


def uniform_side(bits: int, head_dim: int = 128, heads: int = 2) -> UniformSide:
    return Uniform(bits, "channel", 128).layout(PageShape(heads, 128, head_dim), "k")


def keys(head_dim: int = 128, blocks: int = 3, heads: int = 2, seed: int = 0, mean: float = 2.0) -> Tensor:
    """Channels of unlike spread and mean, as keys have before rotation; after it the means are near 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, heads, 128, head_dim, generator=generator) * torch.rand(head_dim, generator=generator)
    return x + mean * torch.randn(heads, 1, head_dim, generator=generator) * torch.rand(head_dim, generator=generator)


def equal(a: SideBytes, b: SideBytes) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.meta, b.meta)


def codes4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit codes [n, H, T, D] and (min, range) [n, H, D] fp16."""
    codes, meta = uniform.encode(x, uniform_side(4, x.shape[3], x.shape[1]))
    return codes, *meta.squeeze(3)


# ---- names


@pytest.mark.parametrize(
    ("name", "canonical", "percent", "ranking"),
    [
        ("kitty-12.5", "kitty-12.5", "12.5", Ranking.MAGNITUDE),
        ("kitty-0", "kitty-0", "0", Ranking.MAGNITUDE),
        ("kitty-100-random", "kitty-100-random", "100", Ranking.RANDOM),
        ("kitty-025.00-variance", "kitty-25-variance", "25", Ranking.VARIANCE),
        ("kitty-33.333333", "kitty-33.333333", "33.333333", Ranking.MAGNITUDE),
    ],
)
def test_names_hold_any_percentage(name: str, canonical: str, percent: str, ranking: Ranking) -> None:
    fmt = make_format(name, BF16)
    assert fmt == Kitty(Decimal(percent), ranking) and fmt.name == canonical
    assert make_format(canonical, BF16) == fmt


@pytest.mark.parametrize(
    "name", ["kitty-101", "kitty-abc", "kitty", "kitty--1", "kitty-25-mean", "kitty-1e1", "kitty-²"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"format='kitty.*0 to 100 such as 12.5"):
        make_format(name, BF16)


def test_names_of_no_family_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown KV format.*dense16.*kitty-12\.5, kitty-25"):
        make_format("puppy-25", BF16)


# ---- sizes


def test_shapes_and_sides_it_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"K alone.*int2-token-128"):
        make_format("kitty-25", BF16).layout(PageShape(2, 128, 128), "v")
    with pytest.raises(ConfigError, match="256 channels"):
        side_of("kitty-25", head_dim=264)


def test_sizes_of_a_head() -> None:
    """The codes of a head are the paper's, 4,096 and 1,024 bytes; its index is 32 bytes, not 128."""
    side = side_of("kitty-25", heads=8)
    assert (side.boosted, side.head_codes_nbytes, side.numbers_offset, side.head_meta_nbytes) == (32, 5120, 512, 544)
    rows = kitty.quantize(keys(heads=8), side)
    low, high = kitty.code_sets(rows, side)
    assert (low.shape[-1], high.shape[-1]) == (4096, 1024)
    assert (rows.codes.shape[1], rows.meta.shape[1]) == (8 * 5120, 8 * 544 + 16)


@pytest.mark.parametrize(("name", "bits"), [("kitty-12.5", 2.387), ("kitty-25", 2.516)])
def test_effective_bits(name: str, bits: float) -> None:
    """With V at 2 bits, everything counted; the paper's layout has 2.406 and 2.531."""
    v = Uniform(2, "token", 128).layout(PageShape(8, 128, 128), "v")
    nbytes = side_of(name, heads=8).nbytes + v.nbytes
    assert 8 * nbytes / (2 * 8 * 128 * 128) == pytest.approx(bits, abs=6e-4)


@pytest.mark.parametrize(("head_dim", "boosted"), [(6, 0), (24, 3), (80, 10), (96, 12), (100, 12), (256, 32)])
def test_the_share_is_rounded_down(head_dim: int, boosted: int) -> None:
    assert side_of("kitty-12.5", head_dim).boosted == boosted


# ---- bytes


def test_codes_of_a_boosted_channel() -> None:
    """Codes 13, 6, 9, 3 of four tokens of a byte: low bits 0xD9, high bits 0x27. The tokens are 32 apart."""
    side = side_of("kitty-100", head_dim=8, heads=1)
    x = torch.zeros(1, 1, 128, 8)
    x[0, 0, 1], x[0, 0, 2] = 0.0, 15.0
    x[0, 0, [5, 37, 69, 101], 3] = torch.tensor([13.0, 6.0, 9.0, 3.0])
    low, high = (part.view(32, 8) for part in kitty.code_sets(kitty.quantize(x, side), side))
    assert (low[5, 3], high[5, 3]) == (0xD9, 0x27)
    assert (low[5] | high[5] << 2)[0] == 0


def test_metadata_is_that_of_uniform_sides_but_for_the_sign_of_boosted_ranges() -> None:
    x, side = keys(), side_of("kitty-25")
    rows, wide = kitty.quantize(x, side), uniform.quantize(x, uniform_side(4))
    low, span = kitty.pairs(rows, side).unbind(2)
    wide_low, wide_span = uniform.read_meta(wide, uniform_side(4)).squeeze(3)
    assert torch.equal(low, wide_low) and torch.equal(span.abs(), wide_span)
    numbers = kitty.numbers(rows, side).long()
    assert torch.equal(numbers, numbers.sort(-1).values)
    assert torch.equal(span.signbit().nonzero()[:, 2].view(numbers.shape), numbers)
    assert torch.equal(uniform.tops(rows, side), wide_span.amax(-1))


def test_without_boost_codes_are_those_of_2_bits() -> None:
    x = keys()
    rows, side = kitty.quantize(x, side_of("kitty-0")), uniform_side(2)
    narrow = uniform.quantize(x, side)
    assert torch.equal(rows.codes, narrow.codes) and torch.equal(rows.meta, narrow.meta)
    assert equal(rows, uniform.demote(uniform.quantize(x, uniform_side(8)), uniform_side(8), side))


@pytest.mark.parametrize("head_dim", [24, 128, 256])
def test_with_all_boosted_values_are_those_of_4_bits(head_dim: int) -> None:
    x, side = keys(head_dim), side_of("kitty-100", head_dim)
    wide = uniform.dequantize(uniform.quantize(x, uniform_side(4, head_dim)), uniform_side(4, head_dim))
    rows = kitty.quantize(x, side)
    assert torch.equal(kitty.numbers(rows, side)[0, 0].long(), torch.arange(head_dim))
    torch.testing.assert_close(kitty.dequantize(rows, side), wide)


@pytest.mark.parametrize("suffix", RANKINGS)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_every_path_down_leads_to_the_same_bytes(head_dim: int, suffix: str) -> None:
    x, side = keys(head_dim), side_of(f"kitty-25{suffix}", head_dim)
    eight, four = uniform_side(8, head_dim), uniform_side(4, head_dim)
    direct, wide = kitty.quantize(x, side), uniform.quantize(x, eight)
    assert equal(kitty.demote(wide, eight, side), direct)
    assert equal(kitty.demote(uniform.demote(wide, eight, four), four, side), direct)
    found = []
    for old, rows in ((eight, wide), (four, uniform.quantize(x, four))):
        out = SideBytes(*(torch.full_like(part, 255) for part in direct[:2]))
        KITTY.cpu.demote(rows, out, old, side)
        found.append(out)
    assert all(equal(out, direct) for out in found)


def test_steps_that_do_not_exist_are_refused() -> None:
    new = side_of("kitty-25")
    for bits in (8, 4):
        check_step(uniform_side(bits), new)
    shape = PageShape(2, 128, 128)
    others = [uniform_side(bits) for bits in (3, 2, 1)] + [side_of("kitty-50"), side_of("kitty-25-random")]
    others += [Uniform(4, "channel", 64).layout(shape, "k"), Uniform(4, "token", 128).layout(shape, "k")]
    for old in others:
        with pytest.raises(ValueError, match="K per channel alone, of 8 or 4 bits in groups of 128"):
            check_step(old, new)
    with pytest.raises(ValueError, match="from kitty to uniform"):
        check_step(new, uniform_side(1))
    assert {"kitty-12.5", "kitty-25"} <= {fmt.name for fmt in narrower_formats(uniform_side(4))}
    assert KITTY in FAMILIES and narrower_formats(new) == []


# ---- ranking


@pytest.mark.parametrize("suffix", RANKINGS)
def test_a_request_alone_decides_what_is_boosted(suffix: str) -> None:
    x, side = keys(blocks=4), side_of(f"kitty-25{suffix}")
    together = kitty.quantize(x, side)
    for i in range(4):
        assert equal(kitty.quantize(x[i : i + 1], side), SideBytes(*(part[i : i + 1] for part in together[:2])))


@pytest.mark.parametrize("suffix", RANKINGS[:2])
def test_permuted_channels_have_a_permuted_index_and_the_same_values(suffix: str) -> None:
    x, side = keys(), side_of(f"kitty-25{suffix}")
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    plain, permuted = kitty.quantize(x, side), kitty.quantize(x[..., order], side)
    numbers = order[kitty.numbers(permuted, side).long()].sort(-1).values
    assert torch.equal(numbers, kitty.numbers(plain, side).long())
    assert torch.equal(kitty.dequantize(permuted, side), kitty.dequantize(plain, side)[..., order])


def test_ties_go_to_the_lower_channel() -> None:
    x = keys(blocks=1)[..., :1].expand(-1, -1, -1, 128)
    for name in ("kitty-25", "kitty-25-variance"):
        side = side_of(name)
        rows = SideBytes(*(torch.empty(1, n, dtype=torch.uint8) for n in (side.codes_nbytes, side.meta_nbytes)))
        KITTY.cpu.seal(x, rows, side)
        for found in (rows, kitty.quantize(x, side)):
            assert (kitty.numbers(found, side) == torch.arange(32)).all()


@pytest.mark.parametrize("suffix", RANKINGS)
@pytest.mark.parametrize("seed", range(3))
def test_more_boost_never_means_more_error(suffix: str, seed: int) -> None:
    """Shares nest, and 4 bits of a channel are never worse than 2 on a page."""
    x, errors = keys(seed=seed), []
    for percent in (0, 6.25, 12.5, 25, 50, 75, 100):
        side = side_of(f"kitty-{percent}{suffix}")
        errors.append((kitty.dequantize(kitty.quantize(x, side), side) - x).square().mean((1, 2, 3)))
    assert all((a >= b).all() for a, b in pairwise(errors)) and (errors[0] > errors[-1]).all()


def test_magnitude_beats_chance() -> None:
    """The error of scores, for queries that do not prefer a channel."""
    x = keys(blocks=8, mean=0.0)
    q = torch.randn(8, 2, 16, 128, generator=torch.Generator().manual_seed(3))
    errors = {}
    for suffix in RANKINGS:
        side = side_of(f"kitty-25{suffix}")
        error = kitty.dequantize(kitty.quantize(x, side), side) - x
        errors[suffix] = float((q @ error.mT).norm())
    assert max(errors[""], errors["-variance"]) < 0.8 * errors["-random"]


def test_scores_are_those_of_values_at_4_bits() -> None:
    x = keys()
    codes, low, span = codes4(x)
    values = low.double().unsqueeze(2) + codes.double() * span.double().unsqueeze(2) / 15
    found = kitty.channel_scores(codes, low, span, Ranking.MAGNITUDE)
    torch.testing.assert_close(found.double() / (15 * 128), values.abs().mean(2))
    found = kitty.channel_scores(codes, low, span, Ranking.VARIANCE)
    torch.testing.assert_close(found.double() / (15 * 128) ** 2, values.var(2, correction=0))


def test_the_selection_is_nearly_that_by_exact_magnitudes() -> None:
    """The paper ranks by the keys before they are quantized. Channels that differ, of those boosted."""
    x, side = keys(blocks=50), side_of("kitty-25")
    exact = kitty.choose(x.abs().mean(2), side.boosted)[1]
    found = kitty.choose(kitty.channel_scores(*codes4(x), Ranking.MAGNITUDE), side.boosted)[1]
    assert 0 < (exact & ~found).sum() / exact.sum() < 0.01


def test_random_ranking_depends_on_the_data_and_the_channel() -> None:
    codes, low, span = codes4(keys(blocks=200))
    chosen = kitty.choose(kitty.channel_scores(codes, low, span, Ranking.RANDOM), 32)[1].float()
    counts = chosen.mean((0, 1))
    assert (counts - 0.25).abs().max() < 0.1  # 400 draws of each channel: six standard deviations are .13
    same = kitty.hash_channels(low[:1, :, :1].expand(-1, -1, 128), span[:1, :, :1].expand(-1, -1, 128))
    assert len(set(same[0, 0].tolist())) == 128


# ---- back ends


@pytest.mark.parametrize("name", [pytest.param("kitty-12.5", marks=pytest.mark.slow), "kitty-25"])
def test_a_page_is_fetched_ahead_and_once(name: str) -> None:
    pytest.importorskip("triton")
    from qkv_engine.kernels.paged_decode.triton import NO_BANKS, Tuning, decode_variant
    from studies.kernels.compiled import compile_kernel, describe
    from studies.kernels.inputs import named_page

    page = named_page(name, "int2-token-128", 8, 128)
    kernel, options, tuning = decode_variant(page, 4, sink_tokens=32)
    one_page = {**options, **NO_BANKS, "STAGES": 4, "OVERLAP": True}  # 4 stages hold one page
    built = compile_kernel(kernel, one_page, Tuning(tuning.num_warps, 4))
    found = describe(built)
    assert "tt.load" not in built.asm["ttgir"].split("scf.for", 1)[1]
    assert found["spilled"] == 0 and found["registers"] <= 200 and found["shared"] <= 5120 + 4096 + 2 * 544 + 2048


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [80, 128, *(pytest.param(d, marks=pytest.mark.slow) for d in (6, 24, 64, 256))])
def test_bytes_on_a_gpu(head_dim: int) -> None:
    """At every share and by every ranking, sealed and stepped down, beside the references."""
    from .kitty_cases import kitty_sides

    sides = kitty_sides(head_dim)
    for bits in (8, 4):
        blocks = sow_odd(make_blocks([*sides, *[uniform_side(bits, head_dim)] * len(sides)], sides[0].shape))
        target = BlockLayout.stack([*sides, *sides])
        memory, where = blocks.memory.cuda(), [address.cuda() for address in (blocks.src, blocks.dst, blocks.next)]
        seal(memory, *where[:2], blocks.source, blocks.target)
        demote(memory, *where[1:], blocks.target, target)
        seal_reference(blocks.memory, blocks.src, blocks.dst, blocks.source, blocks.target)
        demote_reference(blocks.memory, blocks.dst, blocks.next, blocks.target, target)
        assert torch.equal(memory.cpu(), blocks.memory)


def test_device_functions() -> None:
    pytest.importorskip("triton")
    from . import kitty_cases

    figures = run_cases(kitty_cases.__file__)
    limits = {"seal": 0.0, "demote": 0.0, "tile": 1e-5, "decode": 5e-4}
    wrong = {name: figure for name, figure in figures.items() if not figure <= limits[name.split()[0]]}
    assert len(figures) > 24 and not wrong


def test_values_of_v_do_not_exist() -> None:
    side = side_of("kitty-25")
    with pytest.raises(ValueError, match="sides of K"):
        KITTY.cpu.values(torch.ones(1, 2, 1, 128), kitty.quantize(keys(blocks=1), side), side)
