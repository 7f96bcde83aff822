"""Pattern sides: names, which pattern a token takes, folding, mining, and device functions (interpreter)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.formats import BlockLayout, PageShape, SideBytes, check_step, make_format
from qkv_engine.kernels.formats.dense import Dense
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.pattern import NO_PATTERN, PATTERN, PatternSide
from qkv_engine.kernels.formats.pattern import reference as pattern
from qkv_engine.kernels.formats.pattern.layout import gate
from qkv_engine.kernels.formats.uniform import reference as uniform
from qkv_engine.kernels.mine import add_centres, mine
from qkv_engine.kernels.mine.kmeans import evenly, kmeans
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
    """The bytes of patterns [n, M, H, D], and zeros behind them."""
    rows = patterns.half().flatten(1).view(torch.uint8)
    return torch.cat((rows, rows.new_zeros(len(rows), side.bank_nbytes - rows.shape[1])), 1)


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


# ---- mining


def test_kmeans_finds_clusters() -> None:
    """Every one of them, from the farthest points, though most tokens are of one."""
    x, patterns = clustered(4, blocks=1, noise=0.1)
    rare = torch.cat((x[0, :, :1].expand(-1, 500, -1), x[0]), 1)
    found = kmeans(rare, 4)
    assert (torch.cdist(patterns[0].transpose(0, 1).float(), found).amin(-1) < 1).all()
    assert torch.equal(found, kmeans(rare, 4))
    torch.testing.assert_close(found[1:], kmeans(rare[1:], 4))


def test_kmeans_starts_from_the_farthest_points() -> None:
    x = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 9.0], [5.0, 0.0], [0.0, 8.0]]])
    assert torch.equal(kmeans(x, 4, 0), x[:, [0, 2, 3, 1]])
    assert torch.equal(kmeans(x, 3)[0], torch.tensor([[0.5, 0.0], [0.0, 8.5], [5.0, 0.0]]))


def test_kmeans_keeps_empty_clusters() -> None:
    assert torch.equal(kmeans(torch.ones(1, 10, 4), 3), torch.ones(1, 3, 4))


def test_sixteen_bits_tell_tokens_apart_far_from_zero() -> None:
    """The means of bfloat16 tokens beside a large constant leave as little as those of float32."""
    arena = Arena(7)
    for address in arena.src.tolist():
        x = arena.memory[address : address + arena.source.nbytes].view(BF16)
        x.add_(30)
    arena.mine(512)
    x = torch.stack([arena.memory[a : a + arena.source.nbytes].view(BF16) for a in arena.src.tolist()]).float()
    for index in range(4):
        tokens = x.view(4, 4, 2, T, 64)[:, index].transpose(0, 1).flatten(1, 2)
        left = [torch.cdist(tokens, m).amin(-1).square().sum() for m in (arena.patterns(index), kmeans(tokens, 7))]
        assert left[0] < 1.02 * left[1] < 0.1 * (tokens - tokens.mean(1, keepdim=True)).square().sum()


def layouts(number: int, num_layers: int = 2, bits: int = 2, later: int = 0) -> tuple[BlockLayout, BlockLayout]:
    """Dense blocks and blocks with patterns."""
    shape = PageShape(2, T, 64)
    source = BlockLayout.stack(Dense("dense", BF16).layout(shape, name) for _ in range(num_layers) for name in SIDES)
    sides = (replace(side_of(name, number, bits), later=later) for _ in range(num_layers) for name in SIDES)
    return source, BlockLayout.stack(sides)


class Arena:
    """Dense blocks of a request, slots to seal them to, and its bank, among NaNs."""

    def __init__(self, number: int, num_blocks: int = 4, seed: int = 0, later: int = 0):
        self.source, self.target = layouts(number, later=later)
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

    def seal(self, blocks: list[int], num_windows: list[int] | None = None) -> Tensor:
        finite = torch.ones(len(blocks), dtype=torch.int64, device=self.memory.device)
        banks, windows = torch.full_like(finite, self.bank), torch.tensor(num_windows or [0] * len(blocks))
        where = self.src[blocks], self.dst[blocks], self.source, self.target
        transfer(self.memory, *where, finite, banks, windows.to(finite.device))
        return finite


@pytest.mark.parametrize(("number", "num_tokens"), [(40, 300), (7, 512), (255, 128), (3, 1)])
def test_mining_fills_the_bank(number: int, num_tokens: int) -> None:
    arena = Arena(number)
    arena.mine(num_tokens)
    assert arena.memory[arena.bank :].view(torch.float16).isfinite().all()
    for index in range(4):
        found, tokens = arena.patterns(index), arena.x[:, index].transpose(0, 1).flatten(1, 2)[:, :num_tokens].float()
        mined = min(number, num_tokens)
        apart = torch.cdist(found[:, :mined], found[:, :mined]) + torch.eye(mined)
        assert (apart > 0).all() and (found[:, mined:] == 0).all()
        assert (
            torch.cdist(tokens, found[:, :mined]).amin(-1) <= torch.cdist(tokens, kmeans(tokens, 1)).amin(-1) + 0.1
        ).all()


def test_many_tokens_are_thinned_and_little_scratch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv_engine.kernels.mine.MAX_TOKENS", 100)
    thinned = evenly(450, 100)
    assert len(thinned) == 100 and thinned[0] == 0 and thinned[-1] == 445
    arena, other, pieces = Arena(8), Arena(8), Arena(8)
    for i in {*range(450)} - {*thinned.tolist()}:
        address = int(other.src[i // T])
        other.memory[address : address + other.source.nbytes].view(BF16).view(-1, T, 64)[:, i % T] = float("nan")
    arena.mine(450)
    other.mine(450)
    monkeypatch.setattr("qkv_engine.kernels.mine.SCRATCH_NBYTES", 1)
    pieces.mine(450)
    assert torch.equal(arena.memory[arena.bank :], other.memory[arena.bank :])
    assert torch.equal(arena.memory[arena.bank :], pieces.memory[arena.bank :])


def test_bad_values_are_mined_as_zeros() -> None:
    arena = Arena(8)
    arena.memory[int(arena.src[0]) : int(arena.src[0]) + 2048] = 255
    arena.mine(300)
    assert all(arena.patterns(index).isfinite().all() for index in range(4))


def test_sides_may_have_different_numbers_of_patterns() -> None:
    """K and V are then mined by themselves, as if alone."""
    mixed, alone = Arena(8), Arena(8)
    sides = [side_of(name, number) for _ in range(2) for name, number in (("k", 8), ("v", 20))]
    mixed.target = BlockLayout.stack(sides)
    mixed.memory = torch.cat((mixed.memory, torch.full((mixed.target.bank_nbytes,), 255, dtype=torch.uint8)))
    mixed.mine(300)
    alone.mine(300)
    assert torch.equal(mixed.patterns(2), alone.patterns(2)) and mixed.patterns(3)[:, 19].abs().amax() > 0


# ---- windows after the prompt


@pytest.mark.parametrize("name", SIDES)
def test_a_block_chooses_from_the_patterns_it_may_see(name: SideName) -> None:
    """Later patterns are as good as absent until their windows are reached, and no token takes a row without one."""
    x, patterns = clustered(6)
    axis = "channel" if name == "k" else "token"
    side = make_format(f"int2-{axis}-128-patterns4-later2", BF16).layout(PageShape(2, T, 64), name)
    assert isinstance(side, PatternSide) and (side.num_patterns, side.num_later, side.num_rows) == (4, 2, 16)
    bank = bank_of(patterns.expand(3, -1, -1, -1), side)
    for windows, number in ((0, 4), (1, 5), (2, 6), (9, 6)):
        seen = bank[:, : side.visible_nbytes(windows)]
        assert seen.shape[1] == number * side.pattern_nbytes
        index = index_of(pattern.quantize(x, side, seen), side)
        assert sorted(set(index.flatten().tolist()) - {NO_PATTERN}) == list(range(number))


def test_centres_go_behind_the_mined_patterns() -> None:
    arena, plain = Arena(7, later=2), Arena(7)
    bad = arena.memory[int(arena.src[2]) :][:2].view(BF16)
    bad.fill_(float("inf"))
    for each in (arena, plain):
        each.mine(200)
    add_centres(arena.memory, 0, arena.src[1:2].tolist(), arena.bank, arena.source, arena.target)
    add_centres(arena.memory, 1, arena.src[2:].tolist(), arena.bank, arena.source, arena.target)  # room for one of two
    arena.x[2, 0, 0, 0, 0] = 0
    for index in range(4):
        found = arena.patterns(index)
        windows = arena.x[1:3, index].float()
        expected = (windows.amin(2) + windows.amax(2)) / 2
        assert torch.equal(found[:, :7], plain.patterns(index)[:, :7]) and not found[:, 9:].any()
        torch.testing.assert_close(found[:, 7:9], expected.transpose(0, 1).half().float(), rtol=0, atol=0)


def test_hidden_patterns_change_nothing() -> None:
    """A block sealed after later windows has the bytes that it has before them."""
    early, late = Arena(7, later=3), Arena(7, later=3)
    for arena, windows in ((early, 1), (late, 3)):
        alike = arena.x[1, :, :, :1].expand(-1, -1, T, -1).reshape(-1).view(torch.uint8)  # centre: a token of block 1
        arena.memory[int(arena.src[3]) :][: len(alike)] = alike
        arena.mine(200)
        add_centres(arena.memory, 0, arena.src[1 : 1 + windows].tolist(), arena.bank, arena.source, arena.target)
        arena.seal([0, 1], [0, 1])
    for block in (0, 1):
        address = int(early.dst[block])
        assert torch.equal(*(a.memory[address : address + a.target.nbytes] for a in (early, late)))
    late.seal([1], [3])
    assert not torch.equal(*(a.memory[address : address + a.target.nbytes] for a in (early, late)))


# ---- attention on the CPU


def test_attention_of_requests_with_banks() -> None:
    """Decode and prefill of one request and of two, in the order of rungs, against float attention."""
    first, second = Arena(12, seed=1), Arena(12, seed=2)
    size = len(first.memory)
    for arena in (first, second):
        arena.mine(256)
        arena.seal([0, 1, 2])
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
        out = paged_decode(mine, pages, DecodePlan.build(some, T), 0.1)
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


def test_seals_compile_and_do_not_spill() -> None:
    pytest.importorskip("triton")
    from studies.kernels.compiled import compile_kernel, describe, seal_kernels

    kernels = [case for case in seal_kernels() if "int2/128 patterns32" in case[0]]
    assert len(kernels) == 4
    for name, kernel, constexprs, tuning in kernels:
        found = describe(compile_kernel(kernel, constexprs, tuning))
        assert found["spilled"] == 0 and found["shared"] <= 115_712, name  # two programs a multiprocessor


@pytest.mark.parametrize("number", [32, 64])
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
