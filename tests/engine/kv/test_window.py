"""The recent window: which tokens it holds, when a block leaves it, what stays dense; against formulas written out."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv_engine.config import DENSE16, KVConfig
from qkv_engine.kernels.formats.uniform.presets import uniform_rung
from qkv_engine.request import Request, SamplingParams
from qkv_engine.window import RecentWindow

from ...scheduler.common import BLOCK, RUNGS, make_request, make_scheduler, make_space, make_spec, run

RATIOS = st.one_of(
    st.sampled_from([Fraction(text) for text in ("0", "0.1", "0.2", "0.3", "0.99", "1/3", "1/1000")]),
    st.fractions(0, Fraction(999, 1000), max_denominator=1000),
)
WINDOWS = st.builds(RecentWindow.of, st.integers(0, 600), RATIOS)
TWO = RUNGS[:2]
FIFTH = make_spec(TWO, recent_ratio=Fraction(1, 5), eager=True)


def test_the_ratio_is_the_fraction_that_its_decimals_say():
    """In floats .7 * 10 is 7 and .29 * 100 is 28.999..., one token short."""
    window = KVConfig(name="mine", rungs=(DENSE16, uniform_rung(4)), recent_ratio=0.29).window
    assert window.ratio == Fraction(29, 100) and window.older(100) == 71 and floor(0.29 * 100) == 28
    assert KVConfig(name="mine", rungs=(DENSE16,), recent=5, recent_ratio=0).window == RecentWindow(5)
    assert KVConfig(name="mine", rungs=(DENSE16,), recent_ratio=1e-9).window.ratio == Fraction(1, 10**9)


@given(WINDOWS, st.integers(0, 5000))
def test_the_window_is_the_larger_of_a_number_and_a_share(window: RecentWindow, num_computed: int):
    older = num_computed - max(window.num_tokens, floor(window.ratio * num_computed))
    assert window.older(num_computed) == older
    assert older <= window.older(num_computed + 1) <= older + 1


@given(WINDOWS, st.integers(1, 3000))
def test_a_token_leaves_the_window_at_the_least_count_that_says_so(window: RecentWindow, num_older: int):
    least = window.least_computed(num_older)
    assert window.older(least) >= num_older > window.older(least - 1)


@pytest.mark.parametrize(
    ("sink", "recent", "ratio", "expected"),
    [
        # Computed tokens at which blocks 0, 1, 2, ... leave the window; 128, 256, ... tokens after the sink.
        (0, 0, "0.2", [159, 319, 479, 639, 799]),  # of 159 tokens 31 are a fifth, and 128 older
        (32, 0, "0.2", [199, 359, 519, 679, 839]),
        (0, 50, "0.2", [178, 319, 479, 639, 799]),  # 50 tokens are more than a fifth of 178
        (0, 128, "0", [256, 384, 512, 640, 768]),
        (0, 0, "0.5", [255, 511, 767, 1023, 1279]),  # an odd number's half is rounded down
    ],
)
def test_blocks_step_down_at_the_count_reckoned_by_hand(sink: int, recent: int, ratio: str, expected: list[int]):
    ladder = make_spec(
        TWO, sink=sink, recent=recent, recent_ratio=Fraction(ratio), eager=True, sink_nbytes=4 * bool(sink)
    )
    scheduler, request = make_scheduler(40, ladder), make_request("a", 1, max_tokens=1300, floor=1)
    scheduler.add(request)
    seen: list[int] = []
    while not request.is_finished:
        run(scheduler, scheduler.schedule())
        if request.request_id not in scheduler.space.tables:
            break
        # A step's moves are decided from the tokens computed before it.
        down = sum(block.rung for block in scheduler.space.tables.main["a"].blocks)
        seen += [request.num_computed_tokens - 1] * (down - len(seen))
    assert seen[:5] == expected


def test_a_prompt_leaves_a_fifth_dense():
    scheduler, request = make_scheduler(40, FIFTH), make_request("a", 1000, max_tokens=700, floor=1)
    scheduler.add(request)
    found = {}
    while not request.is_finished and request.num_computed_tokens < 1605:
        run(scheduler, scheduler.schedule())
        blocks = scheduler.space.tables.main["a"].blocks
        found[request.num_computed_tokens - 1] = [block.rung for block in blocks]
    assert found[1000] == [1] * 6 + [0, 0]  # 800 tokens are older: six blocks end at 768
    assert found[1118] == [1] * 6 + [0] * 3 and found[1119] == [1] * 7 + [0] * 2  # 896 are older
    assert found[1600] == [1] * 10 + [0] * 3  # 1,280 are older


@given(WINDOWS, st.sampled_from((0, 32)), st.integers(1, 12))
def test_what_is_counted_dense_is_the_most_that_ever_are(window: RecentWindow, sink: int, num_blocks: int):
    """Beside a walk over all tokens: blocks taken for the next one, less those that have left the window."""
    ladder = make_spec(TWO, sink=sink, recent=window.num_tokens, recent_ratio=window.ratio, sink_nbytes=4 * bool(sink))
    tables = make_space(40, ladder).tables
    most, shares = 0, []
    for num_tokens in range(1, sink + num_blocks * BLOCK + 1):
        computed = num_tokens - 1
        older = computed - max(window.num_tokens, floor(window.ratio * computed)) - sink
        blocks = max(0, -(-(num_tokens - sink) // BLOCK))
        most = max(most, blocks - max(0, older // BLOCK))
        shares.append(tables.spec.main.split(num_tokens, 1))
        assert sum(shares[-1]) == blocks and shares[-1][0] == most
        assert tables.spec.main.split(num_tokens, 0) == (blocks, 0)
    assert all(a <= c and b <= d for (a, b), (c, d) in pairwise(shares))


@given(WINDOWS, st.sampled_from((0, 32)), st.integers(3, 14), st.integers(1, 3))
def test_capacity_is_exact(window: RecentWindow, sink: int, slabs: int, slab_blocks: int):
    """The longest request that is taken runs alone to its end, and never gives way; a token more does not fit."""
    ladder = make_spec(TWO, sink=sink, recent=window.num_tokens, recent_ratio=window.ratio, sink_nbytes=4 * bool(sink))
    scheduler = make_scheduler(slabs * slab_blocks, ladder, slab_blocks=slab_blocks, budget=200)
    tables = scheduler.space.tables
    most = tables.max_tokens(1)
    assert tables.fits(tables.demand(most, 1)) and not tables.fits(tables.demand(most + 1, 1))
    if most < 2:
        return
    request = make_request("a", most - 1, max_tokens=2, floor=1)
    scheduler.add(request)
    while not request.is_finished:
        run(scheduler, scheduler.schedule())
        tables.check_integrity()
    assert scheduler.num_preemptions == 0


def test_an_open_end_demands_more_dense_blocks_as_it_grows():
    space, request = make_space(60, FIFTH), Request("a", [1] * BLOCK, SamplingParams(), 10_000, floor=1)
    space.open(request)
    dense = []
    for step in range(1, 1500):
        request.num_tokens += 1
        space.begin_admission(step)
        share = space.demand.share(request)
        slots = space.demand.total.slots(1)
        assert (slots[16], slots[8]) == share.blocks[0]
        dense.append(share.blocks[0][0])
    assert dense == sorted(dense) and (dense[0], dense[-1]) == (3, 5)
