"""The load of a run: rates and times, lengths, limits."""

import math
from statistics import fmean

import pytest

from qkv_engine.bench.load import Range, Rate, draw_requests, meets, parse_lengths, parse_limits, parse_rates
from qkv_engine.bench.timing import Timeline
from qkv_engine.bench.traces import Arrival
from qkv_engine.errors import ConfigError

ONES = [Arrival(1, 1)] * 4000


def test_rates_in_words() -> None:
    rates = parse_rates("8, 0.50,inf,8", has_times=False)
    assert rates == (Rate("8", 8.0), Rate("0.5", 0.5), Rate("inf", math.inf))
    assert parse_rates("trace", has_times=True) == (Rate("trace", None),)
    assert [rate.words for rate in rates] == ["8 a second", "0.5 a second", "all at once"]


@pytest.mark.parametrize("word", ["0", "-1", "nan", "", "1e9", "1_0", "infinity", "8,", "8;9", "2000000", "trace"])
def test_no_rates(word: str) -> None:
    with pytest.raises(ConfigError, match="arrivals="):
        parse_rates(word, has_times=False)


def test_gaps_are_exponential_and_scale_with_the_rate() -> None:
    slow, fast = Rate("2", 2.0).times(ONES, 7), Rate("8", 8.0).times(ONES, 7)
    assert slow == pytest.approx([4 * at for at in fast]) and slow == sorted(slow)
    assert slow[:2] == Rate("2", 2.0).times(ONES[:2], 7) != Rate("2", 2.0).times(ONES[:2], 8)
    gaps = [after - before for before, after in zip([0.0, *slow], slow, strict=False)]
    assert fmean(gaps) == pytest.approx(0.5, rel=0.05)
    assert fmean(gap > 0.5 for gap in gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_all_at_once_and_a_trace() -> None:
    assert Rate("inf", math.inf).times(ONES[:3], 0) == [0.0, 0.0, 0.0]
    assert Rate("trace", None).times([Arrival(1, 1, 0.0), Arrival(1, 1, 2.5)], 0) == [0.0, 2.5]


def test_lengths() -> None:
    assert parse_lengths("512", "input_len") == Range(512, 512)
    assert parse_lengths(" 128 .. 2048", "input_len") == Range(128, 2048)
    found = draw_requests(300, Range(3, 5), Range(7, 7), seed=1)
    assert {request.input_len for request in found} == {3, 4, 5} and {request.output_len for request in found} == {7}
    assert draw_requests(10, Range(3, 5), Range(7, 7), seed=1) == found[:10]
    assert Arrival(3, 7).num_tokens == 9


@pytest.mark.parametrize("word", ["0", "-5", "5..", "..5", "9..3", "5.5", "0..4", "a", "", "99999999"])
def test_no_lengths(word: str) -> None:
    with pytest.raises(ConfigError, match="output_len="):
        parse_lengths(word, "output_len")


def test_limits() -> None:
    assert parse_limits("ttft:1000, tpot:50.5,e2el:3000") == {"ttft": 1000.0, "tpot": 50.5, "e2e": 3000.0}


@pytest.mark.parametrize("word", ["", "ttft", "ttft:", "ttft:0", "ttft:-1", "itl:5", "ttft:1,ttft:2", "e2e:1,e2el:1"])
def test_no_limits(word: str) -> None:
    with pytest.raises(ConfigError, match="goodput="):
        parse_limits(word)


def test_a_request_keeps_all_limits_or_is_not_good() -> None:
    # TTFT 500 ms, TPOT 100 ms, end to end 700 ms
    one = Timeline(sent=10.0, scheduled=10.0, first_token=10.5, last_token=10.7, num_tokens=3)
    assert meets(one, {}) and meets(one, {"ttft": 501.0, "tpot": 101.0, "e2e": 701.0})
    for name, limit in (("ttft", 499.0), ("tpot", 99.0), ("e2e", 699.0)):
        assert not meets(one, {"ttft": 501.0, "tpot": 101.0, "e2e": 701.0} | {name: limit})
    single = Timeline(sent=10.0, scheduled=10.0, first_token=10.5, last_token=10.5, num_tokens=1)
    assert meets(single, {"tpot": 1.0})
