"""Pattern sides: names, which pattern a token takes, folding, mining, centres, and device functions (interpreter)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats import Banks, BlockLayout, PageShape, SideBytes, check_step, make_format
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.pattern import NO_PATTERN, PATTERN, PatternSide
from qkv_engine.kernels.formats.pattern import reference as pattern
from qkv_engine.kernels.formats.pattern.layout import gate
from qkv_engine.kernels.formats.uniform import reference as uniform
from qkv_engine.kernels.mine import MAX_MINED, mine, num_mined
from qkv_engine.kernels.mine.kmeans import kmeans
from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode, paged_decode_reference
from qkv_engine.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from qkv_engine.kernels.request_pages import LayerPages, RequestPages
from qkv_engine.kernels.step_down import transfer

from .common import relative_error
from .interpreted import run_cases

BF16 = torch.bfloat16
T = 128
SIDES: tuple[SideName, SideName] = ("k", "v")


def side_of(
    name: SideName, number: int, bits: int = 2, head_dim: int = 64, heads: int = 2, group: int = 128
) -> PatternSide:
    fmt = make_format(f"int{bits}-{'channel' if name == 'k' else 'token'}-{group}-patterns{number}", BF16)
    found = fmt.layout(PageShape(heads, T, head_dim), name)
    assert isinstance(found, PatternSide)
    return found


def bank_of(patterns: Tensor, side: PatternSide) -> Tensor:
    """The bytes of patterns [n, M, H, D], padded with NaNs as an owner before left them."""
    rows = patterns.half().flatten(1).view(torch.uint8)
    return torch.cat((rows, torch.full((len(rows), side.bank_nbytes - rows.shape[1]), 255, dtype=torch.uint8)), 1)


def clustered(number: int, blocks: int = 3, noise: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [blocks, 2, T, 64] around patterns [1, number, 2, 64]."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(1, number, 2, 64, generator=generator).half()
    at = torch.randint(number, (blocks, 2, T), generator=generator)
    heads = torch.arange(2)[None, :, None]
    x = patterns[0].float()[at, heads] + noise * torch.randn(blocks, 2, T, 64, generator=generator)
    return x.bfloat16().float(), patterns


def index_of(rows: SideBytes, side: PatternSide) -> Tensor:
    return pattern.read_index(rows, side)


# ---- names and steps


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("int2-channel-128-patterns0", "patterns"),
        ("int2-channel-128-patterns256", "patterns"),
        ("int2-token-32-patternsx", "patterns"),
        ("int2-token-32-patterns", "patterns"),
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
@pytest.mark.parametrize("number", [0, 1, 5])
def test_zero_patterns_are_plain_codes(name: SideName, number: int) -> None:
    x, _ = clustered(3)
    side = side_of(name, 5)
    bank = bank_of(torch.zeros(3, 5, 2, 64), side)[:, : number * side.pattern_nbytes]
    rows, plain = pattern.quantize(x, side, bank), uniform.quantize(x, side.residual)
    assert torch.equal(rows.codes, plain.codes) and torch.equal(rows.meta[:, side.index_nbytes :], plain.meta)
    assert (index_of(rows, side) == NO_PATTERN).all()


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_one_pattern_leaves_k_as_it_is(bits: int) -> None:
    x, patterns = clustered(4)
    side = side_of("k", 1, bits)
    rows = pattern.quantize(x, side, bank_of(patterns[:, :1].expand(3, -1, -1, -1), side))
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


def test_v_takes_the_smallest_range_if_the_gate_opens() -> None:
    x, patterns = clustered(6, noise=1.3)
    side = side_of("v", 6)
    index = index_of(pattern.quantize(x, side, bank_of(patterns.expand(3, -1, -1, -1), side)), side).long()
    rest = x.unsqueeze(3) - patterns.float().transpose(1, 2).unsqueeze(2)
    ranges, own = rest.amax(-1) - rest.amin(-1), x.amax(-1) - x.amin(-1)
    expected = torch.where(ranges.amin(-1) <= gate(64) * own, ranges.argmin(-1), NO_PATTERN)
    assert torch.equal(index, expected) and 0.1 < (index == NO_PATTERN).float().mean() < 0.9


def test_k_takes_patterns_for_a_page_or_not_at_all() -> None:
    x, patterns = clustered(6)
    side = side_of("k", 6)
    x[1] = torch.randn(2, T, 64, generator=torch.Generator().manual_seed(1))  # far from any pattern
    index = index_of(pattern.quantize(x, side, bank_of(patterns.expand(3, -1, -1, -1), side)), side)
    has = index != NO_PATTERN
    assert (has.all(-1) | ~has.any(-1)).all() and has[0].all() and not has[1].any()


@pytest.mark.parametrize("name", SIDES)
def test_only_leading_patterns_are_used_and_the_first_of_equal_ones(name: SideName) -> None:
    x, patterns = clustered(6)
    side = side_of(name, 12)
    twice = bank_of(patterns.repeat(1, 2, 1, 1).expand(3, -1, -1, -1), side)
    found = pattern.quantize(x, side, twice[:, : 9 * side.pattern_nbytes])
    index = index_of(found, side)
    assert index[index != NO_PATTERN].max() == 5
    few = index_of(pattern.quantize(x, side, twice[:, : 2 * side.pattern_nbytes]), side)
    assert (few[few != NO_PATTERN] < 2).all()


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


# ---- mining and centres


def test_kmeans_finds_clusters() -> None:
    x, patterns = clustered(4, blocks=1, noise=0.1)
    found = kmeans(x[0], 8, 30)
    nearest = torch.cdist(patterns[0].transpose(0, 1).float(), found).amin(-1)
    assert (nearest < 0.5).all()
    assert torch.equal(found, kmeans(x[0], 8, 30)) and torch.equal(found[1:], kmeans(x[0, 1:], 8, 30))


def test_kmeans_keeps_empty_clusters() -> None:
    x = torch.ones(1, 10, 4)
    assert torch.equal(kmeans(x, 3), torch.ones(1, 3, 4))


def layouts(number: int, num_layers: int = 2, bits: int = 2) -> tuple[BlockLayout, BlockLayout]:
    """Dense blocks and blocks with patterns."""
    shape = PageShape(2, T, 64)
    source = BlockLayout.stack(Dense("dense", BF16).layout(shape, name) for _ in range(num_layers) for name in SIDES)
    return source, BlockLayout.stack(side_of(name, number, bits) for _ in range(num_layers) for name in SIDES)


class Arena:
    """Dense blocks of a request, slots to seal them to, and its bank, among NaNs."""

    def __init__(self, number: int, num_blocks: int = 4, seed: int = 0):
        self.source, self.target = layouts(number)
        unit = 64 * 2
        slot = -(-self.source.nbytes // unit) * unit
        order = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(seed)) * slot
        self.src, self.dst = order.view(2, num_blocks)
        self.bank = 2 * num_blocks * slot
        self.memory = torch.full((self.bank + self.target.bank_nbytes,), 255, dtype=torch.uint8)
        self.x = torch.stack([clustered(7, blocks=num_blocks, seed=4 * seed + i)[0] for i in range(4)], 1).bfloat16()
        for address, x in zip(self.src.tolist(), self.x, strict=True):
            self.memory[address : address + self.source.nbytes] = x.reshape(-1).view(torch.uint8)

    def mine(self, num_tokens: int) -> None:
        mine(self.memory, self.src.tolist(), num_tokens, self.bank, self.source, self.target)

    def patterns(self, index: int) -> Tensor:
        """[H, M, D] of a side."""
        side, first = self.target.sides[index], self.bank + self.target.bank_offsets[index]
        assert isinstance(side, PatternSide)
        return pattern.read_patterns(self.memory[None, first : first + side.bank_nbytes], side)[0]

    def seal(self, blocks: list[int], limit: list[int], centre: list[int]) -> Tensor:
        number = len(blocks)
        banks = Banks(torch.full((number,), self.bank), torch.tensor(limit), torch.tensor(centre))
        finite = torch.ones(number, dtype=torch.int64)
        transfer(self.memory, self.src[blocks], self.dst[blocks], self.source, self.target, finite, banks)
        return finite


@pytest.mark.parametrize(("number", "num_tokens"), [(40, 300), (7, 512), (40, 9), (3, 1), (5, 0)])
def test_mining_fills_the_bank(number: int, num_tokens: int) -> None:
    arena = Arena(number)
    arena.mine(num_tokens)
    mined = num_mined(number, num_tokens)
    assert mined == min(MAX_MINED, number, num_tokens)
    assert (arena.memory[arena.bank :] != 255).any() and arena.memory[arena.bank :].view(torch.float16).isfinite().all()
    for index in range(4):
        found, tokens = arena.patterns(index), arena.x[:, index].transpose(0, 1).flatten(1, 2)[:, :num_tokens].float()
        if mined:
            assert torch.equal(found[:, :mined], kmeans(tokens, mined).half().float())
        assert (found[:, mined:] == 0).all()


def test_many_tokens_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv_engine.kernels.mine.MAX_TOKENS", 100)
    monkeypatch.setattr("qkv_engine.kernels.mine.PIECE_NBYTES", 1)
    arena = Arena(8)
    arena.mine(450)
    tokens = arena.x[:, 3].transpose(0, 1).flatten(1, 2)[:, torch.arange(100) * 450 // 100].float()
    assert torch.equal(arena.patterns(3), kmeans(tokens, 8).half().float())


def test_bad_values_are_mined_as_zeros() -> None:
    arena = Arena(8)
    arena.memory[int(arena.src[0]) : int(arena.src[0]) + 2048] = 255
    arena.mine(300)
    assert all(arena.patterns(index).isfinite().all() for index in range(4))


def test_centres_lie_between_the_ends() -> None:
    arena = Arena(8)
    arena.mine(128)
    before = [arena.patterns(index) for index in range(4)]
    arena.seal([1, 2, 3], [8, 8, 8], [5, -1, 8])
    for index in range(4):
        found, x = arena.patterns(index), arena.x[1, index].float()
        assert torch.equal(found[:, 5], ((x.amin(1) + x.amax(1)) / 2).half().float())
        rest = [m for m in range(8) if m != 5]
        assert torch.equal(found[:, rest], before[index][:, rest])


def test_a_wave_equals_one_block_after_another() -> None:
    wave, single = Arena(12), Arena(12)
    limits, centres = [7, 8, 9, 9], [-1, 7, 8, -1]
    for arena in (wave, single):
        arena.mine(120)
    wave.seal([0, 1, 2, 3], limits, centres)
    for block in range(4):
        single.seal([block], limits[block : block + 1], centres[block : block + 1])
    assert torch.equal(wave.memory, single.memory)


# ---- attention on the CPU


def test_attention_of_requests_with_banks() -> None:
    """Decode and prefill of one request and of two, in the order of rungs, against float attention."""
    first, second = Arena(12, seed=1), Arena(12, seed=2)
    size = len(first.memory)
    for arena in (first, second):
        arena.mine(256)
        arena.seal([0, 1, 2], [12, 12, 12], [-1, -1, 11])
    memory = torch.cat((first.memory, second.memory))
    blocks = memory[:0].view(BF16).view(0, 2, 2, T, 64)
    pages = LayerPages(1, memory, blocks, None, (first.source, first.target))
    requests = [
        RequestPages(256, sealed={1: first.dst[:2].tolist()}, bank=first.bank),
        RequestPages(384, sealed={1: (second.dst[:3] + size).tolist()}, bank=second.bank + size),
    ]
    q = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(3))
    for some in (requests[:1], requests[1:], requests):
        mine = q[: len(some)]
        out = paged_decode(mine, pages, DecodePlan.build(some, T, mine.device), 0.1)
        assert relative_error(out, paged_decode_reference(mine, pages, some, 0.1)) < 1e-5
    k, v = torch.randn(2, 9, 2, 64).bfloat16()
    chunk = torch.randn(9, 6, 64).bfloat16()
    expected = paged_prefill_reference(chunk, k, v, pages, requests[0], 0.1)
    assert relative_error(paged_prefill(chunk, k, v, pages, requests[0], 0.1), expected) < 1e-2
    other = replace(requests[0], bank=requests[1].bank)
    assert relative_error(paged_prefill_reference(chunk, k, v, pages, other, 0.1), expected) > 1e-2


# ---- device functions


def test_device_functions() -> None:
    pytest.importorskip("triton")
    from . import pattern_cases

    figures = run_cases(pattern_cases.__file__)
    limits = {"seal": 0.0, "tile": 1e-5, "decode": 5e-4, "prefill": 5e-4}
    wrong = {name: figure for name, figure in figures.items() if not figure <= limits[name.split()[0]]}
    assert len(figures) > 25 and not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("number", [3, 40])
def test_mining_and_waves_on_a_gpu(number: int) -> None:
    """Means of few tokens to rounding, the same in every run; then the bytes of centres and codes."""
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
    limits, centres = torch.tensor([number - 1, number, number]), torch.tensor([-1, number - 1, -1])
    for arena in (here, there):
        where = [x.to(arena.memory.device) for x in (torch.full((3,), arena.bank), limits, centres)]
        finite = torch.ones(3, dtype=torch.int64, device=arena.memory.device)
        transfer(arena.memory, arena.src[:3], arena.dst[:3], arena.source, arena.target, finite, Banks(*where))
    assert torch.equal(there.memory.cpu(), here.memory)


def test_seals_compile_and_do_not_spill() -> None:
    pytest.importorskip("triton")
    from studies.kernels.compiled import compile_kernel, describe, seal_kernels

    for name, kernel, constexprs, tuning in seal_kernels():
        found = describe(compile_kernel(kernel, constexprs, tuning, enable_fp_fusion=False))
        assert found["spilled"] == 0 and found["shared"] <= 115_712, name  # two programs a multiprocessor


@pytest.mark.parametrize("number", [32, 64])
def test_a_page_is_fetched_ahead_and_once(number: int) -> None:
    pytest.importorskip("triton")
    from qkv_engine.kernels.paged_decode.triton import Tuning, decode_variant
    from studies.kernels.compiled import compile_kernel, describe
    from studies.kernels.inputs import named_page

    page = named_page(f"int2-channel-128-patterns{number}", f"int2-token-128-patterns{number}", 8, 128)
    kernel, options, tuning = decode_variant(page, 8, 4, 128, block_tokens=128, sink_tokens=32)
    built = compile_kernel(kernel, {**options, "STAGES": 4, "OVERLAP": True}, Tuning(tuning.num_warps, 4))
    found = describe(built)
    assert "tt.load" not in built.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
    assert found["spilled"] == 0 and found["shared"] <= 2 * 4096 + 2 * 512 + T + 16 * T + 2048
