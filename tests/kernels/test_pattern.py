"""Pattern sides: names, which pattern a token takes, folding, and device functions (interpreter, compiled)."""

from __future__ import annotations

import pytest
import torch

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats import BlockLayout, PageShape, SideBytes, check_step, make_format
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.pattern import NO_PATTERN, PATTERN
from qkv_engine.kernels.formats.pattern import reference as pattern
from qkv_engine.kernels.formats.pattern.layout import gate
from qkv_engine.kernels.formats.uniform import reference as uniform

from .common import relative_error
from .interpreted import run_cases
from .pattern_sides import BF16, SIDES, Arena, T, bank_of, clustered, index_of, side_of

# ---- names and steps


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("int2-channel-128-patterns0", "patterns"),
        ("int2-channel-128-patterns256", "patterns"),
        ("int2-token-32-patternsx", "patterns"),
        ("int2-token-32-patterns", "patterns"),
        ("int2-token-32-patterns8-later", "patterns"),
        ("int2-token-32-patterns8-later0", "patterns"),
        ("int2-token-32-patterns8-later248", "patterns"),
        ("int2-token-32-patterns0-later8", "patterns"),
        ("int5-token-32-patterns8", "format"),
        ("int2-token-128-subordinate-patterns8", "format"),
        ("int2-token-128-eta0.1-patterns8", "eta"),
    ],
)
def test_wrong_names_are_refused(name: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}="):
        make_format(name, BF16)


@pytest.mark.parametrize(("name", "side"), [("int2-token-128-patterns8", "k"), ("int2-channel-128-patterns8", "v")])
def test_the_other_axis_is_refused(name: str, side: SideName) -> None:
    with pytest.raises(ConfigError, match='"channel" for K and "token" for V'):
        make_format(name, BF16).layout(PageShape(2, T, 64), side)


def test_sizes() -> None:
    side = side_of("k", 33, head_dim=128, heads=8)
    assert side.meta_nbytes == side.residual.meta_nbytes + 8 * T and side.codes_nbytes == side.residual.codes_nbytes
    assert side.bank_nbytes == 64 * 8 * 128 * 2 and side.bank_nbytes % 128 == 0
    assert side_of("v", 1, head_dim=6, heads=1).bank_nbytes == 256  # 16 patterns of 12 bytes, padded
    sides = [side_of("k", 32), side_of("v", 32), side_of("k", 16), side_of("v", 3)]
    layout = BlockLayout.stack(sides)
    assert layout.bank_offsets == (0, 8192, 16384, 20480) and layout.bank_nbytes == 24576
    assert [(page.k_bank, page.v_bank) for page in layout.pages] == [(0, 8192), (16384, 20480)]
    assert all(page.has_bank for page in layout.pages)


def test_steps() -> None:
    for old, new in ((4, 2), (4, 1), (2, 1), (8, 2)):
        check_step(side_of("v", 9, old), side_of("v", 9, new))
    check_step(Dense("dense", BF16).layout(PageShape(2, T, 64), "k"), side_of("k", 9))
    refused = [(side_of("k", 9, 2), side_of("k", 9, 4)), (side_of("k", 9, 4), side_of("k", 8, 2))]
    refused += [(side_of("k", 9, 4, group=64), side_of("k", 9, 2)), (side_of("k", 9, 4), side_of("k", 9, 3))]
    for old_side, new_side in refused:
        with pytest.raises(ValueError, match=r"keeps|from"):
            check_step(old_side, new_side)
    with pytest.raises(ValueError, match="from uniform to pattern"):
        check_step(side_of("k", 9, 4).residual, side_of("k", 9, 2))
    with pytest.raises(ValueError, match="from pattern to uniform"):
        check_step(side_of("k", 9, 4), side_of("k", 9, 2).residual)


# ---- assignment


def test_the_gate() -> None:
    for head_dim, rho in ((64, 0.876419), (128, 0.911553), (256, 0.936834)):
        assert gate(head_dim) == pytest.approx(rho, abs=1e-6)
    assert gate(2) == 0 and 0 < gate(3) < 1


@pytest.mark.parametrize("name", SIDES)
def test_zero_patterns_are_plain_codes(name: SideName) -> None:
    x, _ = clustered(3)
    side = side_of(name, 5)
    rows, plain = pattern.quantize(x, side, bank_of(torch.zeros(3, 5, 2, 64), side)), uniform.quantize(x, side.residual)
    assert torch.equal(rows.codes, plain.codes) and torch.equal(rows.meta[:, side.index_nbytes :], plain.meta)
    assert (index_of(rows, side) == NO_PATTERN).all()


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_equal_patterns_leave_k_as_it_is(bits: int) -> None:
    x, patterns = clustered(4)
    side = side_of("k", 16, bits)
    rows = pattern.quantize(x, side, bank_of(patterns[:, :1].expand(3, 16, -1, -1), side))
    plain = uniform.quantize(x, side.residual)
    assert torch.equal(rows.codes, plain.codes) and torch.equal(rows.meta[:, side.index_nbytes :], plain.meta)


@pytest.mark.parametrize("name", SIDES)
def test_tokens_take_the_pattern_that_they_lie_around(name: SideName) -> None:
    x, patterns = clustered(6)
    side = side_of(name, 6)
    rows = pattern.quantize(x, side, bank_of(patterns.expand(3, -1, -1, -1), side))
    nearest = (x.unsqueeze(3) - patterns.float().transpose(1, 2).unsqueeze(2)).norm(dim=-1).argmin(-1)
    index = index_of(rows, side).long()
    assert ((index == nearest) | (index == NO_PATTERN)).all() and (index != NO_PATTERN).float().mean() > 0.95
    plain = uniform.dequantize(uniform.quantize(x, side.residual), side.residual)
    read = rows._replace(bank=bank_of(patterns.expand(3, -1, -1, -1), side))
    assert (pattern.dequantize(read, side) - x).square().mean() < 0.2 * (plain - x).square().mean()


def test_v_takes_the_nearest_pattern_if_the_gate_opens() -> None:
    x, patterns = clustered(16, noise=1.3)
    side = side_of("v", 16)
    index = index_of(pattern.quantize(x, side, bank_of(patterns.expand(3, -1, -1, -1), side)), side).long()
    rest = x.unsqueeze(3) - patterns.float().transpose(1, 2).unsqueeze(2)
    nearest = rest.norm(dim=-1).argmin(-1)
    ranges, own = (rest.amax(-1) - rest.amin(-1)).gather(3, nearest.unsqueeze(3))[..., 0], x.amax(-1) - x.amin(-1)
    assert torch.equal(index, torch.where(ranges <= gate(64) * own, nearest, NO_PATTERN))
    assert 0.1 < (index == NO_PATTERN).float().mean() < 0.9


def test_k_takes_patterns_for_a_page_or_not_at_all() -> None:
    x, patterns = clustered(6)
    side = side_of("k", 6)
    x[1] = torch.randn(2, T, 64, generator=torch.Generator().manual_seed(1))  # far from any pattern
    index = index_of(pattern.quantize(x, side, bank_of(patterns.expand(3, -1, -1, -1), side)), side)
    has = index != NO_PATTERN
    assert (has.all(-1) | ~has.any(-1)).all() and has[0].all() and not has[1].any()


@pytest.mark.parametrize("name", SIDES)
def test_the_first_of_equal_patterns_is_used(name: SideName) -> None:
    x, patterns = clustered(6)
    side = side_of(name, 12)
    index = index_of(pattern.quantize(x, side, bank_of(patterns.repeat(1, 2, 1, 1).expand(3, -1, -1, -1), side)), side)
    assert index[index != NO_PATTERN].max() == 5


@pytest.mark.parametrize("name", SIDES)
def test_huge_elements_leave_finite_metadata(name: SideName) -> None:
    x, patterns = clustered(4)
    x[0, :, :, 1::2], x[1, 0, 3, 2] = 60000, float("nan")
    x[0, 1] *= -1
    side = side_of(name, 4)
    bank = bank_of((patterns * 32752 / patterns.abs().max()).expand(3, -1, -1, -1), side)
    rows = pattern.quantize(x, side, bank)
    assert pattern.dequantize(rows._replace(bank=bank), side).isfinite().all()
    out = SideBytes(torch.empty_like(rows.codes), torch.empty_like(rows.meta), bank)
    assert not PATTERN.cpu.seal(x, out, side)
    assert torch.equal(out.codes, rows.codes) and torch.equal(out.meta, rows.meta)


@pytest.mark.parametrize("name", SIDES)
def test_a_block_alone_decides_its_codes(name: SideName) -> None:
    x, patterns = clustered(6)
    side, several = side_of(name, 6), torch.cat((patterns, patterns * 0.9, -patterns))
    together = pattern.quantize(x, side, bank_of(several, side))
    for i in range(3):
        alone = pattern.quantize(x[i : i + 1], side, bank_of(several[i : i + 1], side))
        assert torch.equal(alone.codes[0], together.codes[i]) and torch.equal(alone.meta[0], together.meta[i])


@pytest.mark.parametrize("name", SIDES)
def test_demotion_equals_sealing_to_few_bits(name: SideName) -> None:
    x, patterns = clustered(6)
    bank = bank_of(patterns.expand(3, -1, -1, -1), side_of(name, 6))
    four, two = (pattern.quantize(x, side_of(name, 6, bits), bank) for bits in (4, 2))
    found = pattern.demote(four, side_of(name, 6, 4), side_of(name, 6, 2))
    assert torch.equal(found.codes, two.codes) and torch.equal(found.meta, two.meta)


def test_table_and_masses_equal_the_explicit_gather() -> None:
    x, patterns = clustered(6)
    for name in SIDES:
        side = side_of(name, 6)
        bank = bank_of(patterns.expand(3, -1, -1, -1), side)
        rows = pattern.quantize(x, side, bank)._replace(bank=bank)
        values, inputs = pattern.dequantize(rows, side), torch.rand(3, 2, 5, 64 if name == "k" else T)
        product = PATTERN.cpu.scores if name == "k" else PATTERN.cpu.values
        assert relative_error(product(inputs, rows, side), inputs @ (values.mT if name == "k" else values)) < 1e-5


# ---- device functions


def test_device_functions() -> None:
    pytest.importorskip("triton")
    from . import pattern_cases

    figures = run_cases(pattern_cases.__file__)
    limits = {"seal": 0.0, "tile": 1e-5, "decode": 5e-4, "prefill": 5e-4}
    wrong = {name: figure for name, figure in figures.items() if not figure <= limits[name.split()[0]]}
    assert len(figures) > 20 and not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("number", [3, 40])
def test_mining_and_seals_on_a_gpu(number: int) -> None:
    """The same means in every run, those of few tokens as on the CPU to rounding; then the bytes of codes."""
    here, there = Arena(number), Arena(number)
    there.memory, there.src, there.dst = there.memory.cuda(), there.src.cuda(), there.dst.cuda()
    for num_tokens in (3, 300):
        here.mine(num_tokens)
        found = []
        for _ in range(2):
            there.mine(num_tokens)
            found.append(there.memory[there.bank :].cpu())
        assert torch.equal(*found)
        if num_tokens == 3:
            torch.testing.assert_close(*(x.view(torch.float16) for x in (found[0], here.memory[here.bank :])))
    here.memory[here.bank :] = found[0]
    for arena in (here, there):
        arena.seal([0, 1, 2])
    assert torch.equal(there.memory.cpu(), here.memory)


@pytest.mark.slow
def test_seals_compile_and_do_not_spill() -> None:
    pytest.importorskip("triton")
    from studies.kernels.compiled import compile_kernel, describe, seal_kernels

    kernels = [case for case in seal_kernels() if "int2/128 patterns32" in case[0]]
    assert len(kernels) == 4
    for name, kernel, constexprs, tuning in kernels:
        found = describe(compile_kernel(kernel, constexprs, tuning))
        assert found["spilled"] == 0 and found["shared"] <= 115_712, name  # two programs a multiprocessor


@pytest.mark.parametrize("number", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_a_page_is_fetched_ahead_and_once(number: int) -> None:
    pytest.importorskip("triton")
    from qkv_engine.kernels.paged_decode.triton import Tuning, decode_variant
    from studies.kernels.compiled import compile_kernel, describe
    from studies.kernels.inputs import named_page

    page = named_page(f"int2-channel-128-patterns{number}", f"int2-token-128-patterns{number}", 8, 128)
    kernel, options, tuning = decode_variant(page, 4, sink_tokens=32)
    built = compile_kernel(kernel, {**options, "STAGES": 4, "OVERLAP": True}, Tuning(tuning.num_warps, 4))
    found = describe(built)
    assert "tt.load" not in built.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
    assert found["spilled"] == 0 and found["shared"] <= 2 * 4096 + 2 * 512 + T + 16 * T + 2048
