"""TTFT, TPOT, ITL and rates of timelines made by hand: exact numbers."""

import numpy as np
import pytest

from qkv_engine.bench.timing import Timeline, decode_rate, median, peak_overlap, percentile, run_figures


def line(sent: float, *times: float, scheduled: float | None = None) -> Timeline:
    return Timeline(
        sent=sent,
        scheduled=sent if scheduled is None else scheduled,
        first_token=times[0],
        last_token=times[-1],
        num_tokens=len(times),
        token_times=times,
    )


def test_one_request() -> None:
    times = line(10.0, 10.5, 10.75, 11.5)
    assert times.ttft == 0.5
    assert times.tpot == 0.5  # (11.5 - 10.5) / (3 - 1), not divided by 3
    assert times.gaps == [0.25, 0.75]


def test_a_single_token_has_no_time_per_further_token() -> None:
    figures = run_figures([line(0.0, 2.0)], num_prompt_tokens=6, seconds=2.0)
    assert figures.ttft_ms == 2000.0
    assert figures.output_tok_s == 0.5
    assert figures.total_tok_s == 3.5
    assert figures.tpot_ms is figures.itl_ms is figures.itl_p99_ms is figures.decode_tok_s is None


def test_a_run_pools_gaps_and_takes_medians_over_requests() -> None:
    lines = [line(0.0, 1.0, 2.0, 3.0), line(0.0, 2.0, 3.0, 4.0), line(1.0, 2.0, 4.0, 7.0)]
    figures = run_figures(lines, num_prompt_tokens=11, seconds=8.0)
    assert figures.ttft_ms == 1000.0  # of 1, 2, 1 s
    assert figures.tpot_ms == 1000.0  # of 1, 1, 2.5 s
    assert figures.itl_ms == 1000.0  # of 1, 1, 1, 1, 2, 3 s
    assert figures.itl_p99_ms == pytest.approx(2950.0)
    assert figures.output_tok_s == 9 / 8
    assert figures.total_tok_s == 20 / 8
    assert figures.max_running == 3


def test_decode_rate_counts_only_while_all_decode() -> None:
    # All decode from 2.0, the second's first token, to 4.0, the first's last: 2 + 2 tokens in 2 s.
    assert decode_rate([line(0.0, 1.0, 2.0, 3.0, 4.0), line(0.0, 2.0, 3.0, 4.0, 5.0)]) == 2.0


def test_decode_rate_of_a_batch_in_step_is_tokens_after_the_first() -> None:
    assert decode_rate([line(0.0, 1.0, 1.5, 2.0)] * 4) == 4 * 2 / 1.0


def test_no_decode_rate_when_the_requests_never_meet() -> None:
    assert decode_rate([line(0.0, 1.0, 2.0), line(0.0, 3.0, 4.0)]) is None


def test_without_token_times_only_what_needs_none() -> None:
    bare = Timeline(sent=0.0, scheduled=0.0, first_token=1.0, last_token=3.0, num_tokens=5)
    figures = run_figures([bare], num_prompt_tokens=1, seconds=3.0)
    assert figures.tpot_ms == 500.0
    assert figures.itl_ms is figures.decode_tok_s is None


def test_overlap() -> None:
    assert peak_overlap([(0, 2), (1, 3), (2, 4)]) == 2  # one starts as another ends
    assert peak_overlap([(0, 1), (1, 2)]) == 1


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0], [float(i * i % 7) for i in range(50)]])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentile_is_numpys(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_of_nothing_there_is_nothing() -> None:
    assert percentile([], 99) is None
    assert median([None, None]) is None
    assert median([None, 2.0, 1.0]) == 1.5
