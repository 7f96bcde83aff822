"""The study of PatternKV's choices: assignments by pages, starts of clusters, sides that mine late, the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv_engine.bench.questions import parse_tasks
from studies.papers.demo import demo_model
from studies.papers.patternkv import PatternSide, nearest
from studies.pattern_choices import (
    BEST,
    GROUPS,
    KEYS,
    Choice,
    Late,
    LateWithoutCentres,
    Start,
    Sums,
    around_middle,
    at_random,
    boosted,
    channel_ranges,
    evenly,
    farthest_first,
    if_shrinks,
    main,
    mined,
    one_after_another,
    pages,
    read,
    uniform,
)


def clustered(num_tokens: int = 256, dim: int = 16, count: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens [1, n, D], each near one of the returned centres [1, count, D]."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1, count, dim, generator=generator) * 4
    noise = torch.randn(1, num_tokens, dim, generator=generator) * 0.1
    return centres[:, torch.randint(count, (num_tokens,), generator=generator)] + noise, centres


def ranges(x: Tensor) -> Tensor:
    """Sum of channel ranges of each page."""
    return channel_ranges(pages(x)).sum(-1)


def test_a_pattern_of_all_tokens_is_no_gain():
    x, centres = clustered()
    assert not if_shrinks(nearest)(x, centres[:, :1]).any()
    assert torch.equal(if_shrinks(nearest)(x, centres), nearest(x, centres))


def test_an_offset_of_a_whole_page_does_not_hide_its_patterns():
    x, centres = clustered()
    moved = x + 6 * centres[:, :1]
    assert (ranges(moved - around_middle(moved, centres)) < ranges(moved - nearest(moved, centres)) / 4).all()


def test_one_after_another_makes_ranges_smaller_still():
    x = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0))
    patterns = x[:, :12]
    least, near = (
        channel_ranges(pages(x - assign(x, patterns))).square().sum(-1) for assign in (one_after_another, nearest)
    )
    assert (least < near).all()


def test_the_farthest_tokens_are_taken_first():
    x = torch.zeros(2, 50, 4)
    x[0, 7], x[0, 31], x[1, 40] = 5.0, -9.0, 1.0
    found = farthest_first(x, 3)
    assert found[:, :, 0].tolist() == [[0, -9, 5], [0, 1, 0]]


@pytest.mark.parametrize("start", [evenly, at_random, farthest_first])
def test_few_tokens_are_patterns_of_their_own(start: Start):
    x, _ = clustered(6)
    found = mined(x, patterns=32, iterations=5, tokens=1024, start=start)
    assert sorted(found[0].tolist()) == sorted(x[0].half().float().tolist())


def test_clusters_are_found_from_the_farthest_tokens():
    x, centres = clustered()
    found = mined(x, patterns=4, iterations=2, tokens=1024, start=farthest_first)
    assert (nearest(centres, found) - centres).abs().max() < 0.1


def num_patterns(kind: type[PatternSide], num_tokens: int) -> int:
    """Patterns of a side after a prompt of ten tokens and others one by one."""
    x, _ = clustered(num_tokens, dim=128, count=40)
    layer = BEST._replace(kind=kind).layer()
    for piece in (x[:, :10], *x[:, 10:].split(1, dim=1)):
        layer.attend(piece, piece, piece)
    assert isinstance(layer.k, PatternSide)
    return 0 if layer.k.patterns is None else layer.k.patterns.shape[1]


@pytest.mark.parametrize(
    ("kind", "counts"), [(PatternSide, [10, 11, 12]), (Late, [0, 32, 33]), (LateWithoutCentres, [0, 32, 32])]
)
def test_a_short_prompt_is_mined_with_the_tokens_that_fill_a_window(kind: type[PatternSide], counts: list[int]):
    assert [num_patterns(kind, length) for length in (127, 128, 256)] == counts


def test_bits_of_coders():
    """The table of costs: 2.25 and 3 bits of plain codes, 2.5625 and 2.8125 of Kitty's keys."""
    assert KEYS.bits == 2.25 and uniform(lambda quantize, group: quantize, 32).bits == 3
    assert boosted(16).bits == 2.5625 and boosted(32).bits == 2.8125


@pytest.fixture(scope="module")
def question() -> tuple[list[int], list[int]]:
    example = parse_tasks("addition:6", samples=1)[0].examples[0]
    with demo_model() as (_, tokenizer):
        return tokenizer.encode(example.chat), tokenizer.encode(example.reply)


def test_a_right_reply_read_in_full_precision_is_right_and_without_error(question: tuple[list[int], list[int]]):
    exact, coded, wrong = Sums(), Sums(), Sums()
    with demo_model() as (model, _):
        read(model, Choice(), *question, exact)
        read(model, BEST, *question, coded)
        read(model, Choice(), question[0], [*question[1][:-2], 5, question[1][-1]], wrong)
    assert (exact.right, exact.asked, wrong.right) == (1, 1, 0) and exact.loss < 1 < wrong.loss
    assert exact.relative("output") == 0 and exact.bits == 0 and coded.elements > 0
    assert 0 < coded.relative("v") < coded.relative("k") < 0.5
    assert coded.bits / coded.elements > 2.25 + 8 / 128


def test_the_table_has_a_row_for_each_choice(capsys: pytest.CaptureFixture[str]):
    main(["--group", "values", "--only", "no patterns; range, gate", "--tasks", "addition:4", "--samples", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and "| no patterns" in lines[2] and "| range, gate" in lines[3]


def test_names_that_a_group_lacks_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--group", "values", "--only", "no such choice"])
    said = capsys.readouterr().err
    assert all(name in said for name in GROUPS["values"])
