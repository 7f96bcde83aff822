"""PatternKV by its paper's rules: mining, assignment, V's gate, windows, and KIVI as the scheme without patterns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from studies.papers import kivi, patternkv
from studies.papers.cache import LayerCache, Side, attention
from studies.papers.patternkv import PatternSide, flattest, gate_limit, gated, nearest


def eighths(heads: int, num_tokens: int, dim: int, seed: int = 0) -> Tensor:
    """Values whose sums and differences fp16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32, 33, (heads, num_tokens, dim), generator=generator) / 8


def clusters(num_tokens: int, dim: int = 128, count: int = 4, noise: float = 0.1) -> Tensor:
    """One head whose token t lies near centre t % count, ``[1, n, D]``."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(count, dim, generator=generator) * 3
    return (centres[torch.arange(num_tokens) % count] + torch.randn(num_tokens, dim, generator=generator) * noise)[None]


def fed(layer: LayerCache, x: Tensor, prompt: int) -> LayerCache:
    """``layer`` with a prompt and the other tokens of ``x`` [H, n, D] one by one."""
    for piece in (x[:, :prompt], *x[:, prompt:].split(1, dim=1)):
        layer.attend(piece, piece, piece)
    return layer


def sides(layer: LayerCache) -> tuple[PatternSide, PatternSide]:
    assert isinstance(layer.k, PatternSide) and isinstance(layer.v, PatternSide)
    return layer.k, layer.v


# ---- windows (golden check 16)


@pytest.mark.parametrize(
    ("prompt", "after", "full", "patterns"),
    [
        (127, 0, 127, 32),
        (127, 1, 0, 33),
        (128, 0, 0, 32),
        (128, 1, 1, 32),
        (128, 128, 0, 33),
        (300, 0, 44, 32),
        (300, 84, 0, 33),
        (5, 130, 7, 6),
    ],
)
def test_both_sides_leave_full_precision_in_windows(prompt: int, after: int, full: int, patterns: int):
    """A prompt of exactly 128 tokens among them, after which the release keeps V at 16 bits for ever."""
    layer = fed(patternkv.layer(128), clusters(prompt + after), prompt)
    for side in sides(layer):
        assert side.full == full and side.quantized == prompt + after - full
        assert side.patterns is not None and side.patterns.shape == (1, patterns, 128)


def test_the_token_that_fills_a_window_still_sees_it_in_full_precision():
    x = clusters(128).half().float()
    layer = fed(patternkv.layer(128), x[:, :127], 127)
    assert torch.equal(layer.attend(x[:, 127:], x[:, 127:], x[:, 127:]), attention(x[:, 127:], x, x))
    assert layer.k.full == 0 and not torch.equal(layer.k.tokens, x)


def test_a_window_adds_the_middle_of_each_channel():
    x = eighths(2, 256, 128)
    k, _ = sides(fed(patternkv.layer(128), x, 128))
    window = x[:, 128:]
    assert k.patterns is not None
    assert torch.equal(k.patterns[:, -1], (window.amin(1) + window.amax(1)) / 2)


# ---- patterns


def test_patterns_of_a_short_prompt_are_its_tokens():
    x = eighths(2, 7, 16)
    found = patternkv.mine(x)
    for head in range(2):
        assert sorted(found[head].tolist()) == sorted(x[head].tolist())


def test_patterns_are_the_means_of_clusters():
    x = clusters(400)
    means = torch.stack([x[0, i::4].mean(0) for i in range(4)]).repeat(100, 1)[None]
    found = nearest(x, patternkv.mine(x, 16))
    assert (found - means).square().mean() < (x - means).square().mean()


def test_heads_are_mined_alone_as_among_others():
    x = torch.cat((clusters(200), clusters(200, count=7), eighths(1, 200, 128)))
    assert all(torch.equal(patternkv.mine(x[i, None])[0], patternkv.mine(x)[i]) for i in range(3))


def test_clusters_without_tokens_start_again_at_one():
    x = torch.ones(1, 64, 8) * 3
    assert torch.equal(patternkv.mine(x), x[:, :32])


# ---- assignment


def test_distances_differ_where_an_offset_is_common():
    """A constant offset costs a group of channels nothing; a shape costs it all."""
    x = torch.tensor([0.0, 1, 2, 3]).expand(1, 1, 4)
    patterns = torch.stack((x[0, 0] + 40, torch.zeros(4), x[0, 0] + 40))[None]
    assert torch.equal(flattest(x, patterns), patterns[:, :1])
    assert torch.equal(nearest(x, patterns), patterns[:, 1:2])


def test_the_gate_lets_patterns_through_that_shrink_a_token_enough():
    x = torch.tensor([[[0.0, 4], [0, 4]], [[2, 2], [0, 4]]])
    pattern = torch.tensor([[[0.0, 0.5]], [[0.0, 0.25]]])
    found = gated(nearest, gate_limit(128))(x, pattern)
    assert found.tolist() == [[[0, 0.5], [0, 0.5]], [[0, 0], [0, 0]]]  # .875 of the range; a constant token; .9375


@pytest.mark.parametrize(
    ("dim", "limit"), [(64, 0.876419), (80, 0.8890), (96, 0.8984), (128, 0.911553), (256, 0.936834)]
)
def test_limits_of_the_gate(dim: int, limit: float):
    """Golden check 18."""
    assert gate_limit(dim) == pytest.approx(limit, abs=5e-5 if dim in (80, 96) else 5e-7)


def test_limits_of_other_significances():
    assert gate_limit(128, 0.01) == pytest.approx(0.8764, abs=5e-5)
    assert gate_limit(128, 0.10) == pytest.approx(0.9306, abs=5e-5)


# ---- beside KIVI (golden check 18)


def kivi_sides(x: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as KIVI in groups of 128 leaves them, all tokens quantized."""
    layer = kivi.layer(2, 2, group=128)
    found = []
    for side in (layer.k, layer.v):
        whole = Side(lambda full: full, side.simulate)
        whole.append(x)
        whole.settle()
        found.append(whole.tokens)
    return found[0], found[1]


def with_patterns(patterns: Tensor) -> LayerCache:
    """A layer with these patterns [H, M, D] for every token, and no gate."""
    k, v = (PatternSide(lambda x: patterns, nearest, nearest, side.quantize) for side in sides(patternkv.layer(128)))
    return LayerCache(k, v)


def test_without_patterns_it_is_kivi():
    x = eighths(2, 256, 128)
    layer = fed(with_patterns(torch.zeros(2, 3, 128)), x, 256)
    for found, expected in zip((layer.k.tokens, layer.v.tokens), kivi_sides(x), strict=True):
        assert torch.equal(found, expected)


def test_one_pattern_changes_no_key_and_every_value():
    """A pattern that a whole group subtracts leaves its ranges; along the channels of a token it does not."""
    x = eighths(2, 256, 128)
    layer = fed(with_patterns(eighths(2, 1, 128, seed=5)), x, 256)
    keys, values = kivi_sides(x)
    assert torch.equal(layer.k.tokens, keys)
    assert not torch.equal(layer.v.tokens, values)


def test_patterns_lower_the_error_of_tokens_in_clusters():
    x = clusters(512)
    layer = fed(patternkv.layer(128), x, 384)
    for side, plain in zip(sides(layer), kivi_sides(x), strict=True):
        assert (side.tokens - x).square().mean() < (plain - x).square().mean() / 20
