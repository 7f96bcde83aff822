"""Patterns of a request: mined from its prompt, added by later windows, read by attention on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qkv_engine.kernels.formats import BlockLayout, PageShape, make_format
from qkv_engine.kernels.formats.family import SideName
from qkv_engine.kernels.formats.pattern import NO_PATTERN, PatternSide
from qkv_engine.kernels.formats.pattern import reference as pattern
from qkv_engine.kernels.mine import add_centres
from qkv_engine.kernels.mine.kmeans import evenly, kmeans
from qkv_engine.kernels.paged_decode import DecodePlan, paged_decode, paged_decode_reference
from qkv_engine.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from qkv_engine.kernels.request_pages import LayerPages, RequestPages

from .common import relative_error
from .pattern_sides import BF16, SIDES, Arena, T, bank_of, clustered, index_of, side_of

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
