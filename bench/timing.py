"""Throughput and latency of a run by its token times, as vLLM's benchmarks define them.

Pure arithmetic on times in seconds; nothing here runs an engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One request's times, in seconds on one clock. ``token_times`` may be empty; then there is no ITL."""

    sent: float
    scheduled: float
    first_token: float
    last_token: float
    num_tokens: int
    token_times: Sequence[float] = ()

    @classmethod
    def read(cls, sent: float, times: Sequence[float]) -> Timeline:
        """The times of a request as its reader saw them: when it was sent, and when each token came."""
        first, last = times[0], times[-1]
        return cls(
            sent=sent, scheduled=sent, first_token=first, last_token=last, num_tokens=len(times), token_times=times
        )

    @property
    def ttft(self) -> float:
        """Time to first token: from the request being sent."""
        return self.first_token - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.num_tokens <= 1:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    @property
    def e2e(self) -> float:
        """End-to-end latency: from the request being sent to its last token."""
        return self.last_token - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: every gap between neighbouring tokens."""
        return [after - before for before, after in pairwise(self.token_times)]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run of one batch. Rates are per second of wall clock; latencies are medians over the requests."""

    output_tok_s: float
    total_tok_s: float
    decode_tok_s: float | None
    ttft_ms: float
    tpot_ms: float | None
    itl_ms: float | None
    itl_p99_ms: float | None
    max_running: int


def run_figures(timelines: Sequence[Timeline], *, num_prompt_tokens: int, seconds: float) -> RunFigures:
    """Figures of a run that took ``seconds`` and processed ``num_prompt_tokens`` over all its requests."""
    num_output_tokens = sum(t.num_tokens for t in timelines)
    gaps = [gap for t in timelines for gap in t.gaps]
    return RunFigures(
        output_tok_s=num_output_tokens / seconds,
        total_tok_s=(num_prompt_tokens + num_output_tokens) / seconds,
        decode_tok_s=decode_rate(timelines),
        ttft_ms=1e3 * statistics.median(t.ttft for t in timelines),
        tpot_ms=_in_ms(median(t.tpot for t in timelines)),
        itl_ms=_in_ms(median(gaps)),
        itl_p99_ms=_in_ms(percentile(gaps, 99)),
        max_running=peak_overlap([(t.scheduled, t.last_token) for t in timelines]),
    )


def decode_rate(timelines: Sequence[Timeline]) -> float | None:
    """Tokens per second while the whole batch decodes.

    The window opens with the last request's first token and closes with the first request's last token; no
    prompt is read in it, so this is the pure decode speed at this batch size. None where the requests never
    all decode at once (some queued), for one output token, and without token times.
    """
    if not all(t.token_times for t in timelines):
        return None
    start = max(t.token_times[0] for t in timelines)
    end = min(t.token_times[-1] for t in timelines)
    if end <= start:
        return None
    return sum(start < time <= end for t in timelines for time in t.token_times) / (end - start)


def peak_overlap(intervals: Sequence[tuple[float, float]]) -> int:
    """The largest number of ``(start, end)`` intervals open at one moment; one may start as another ends."""
    events = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    running = peak = 0
    for _, change in events:
        running += change
        peak = max(peak, running)
    return peak


def median(values: Iterable[float | None]) -> float | None:
    """The median of ``values``, Nones left out; None if nothing is left."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The ``percent``-th percentile, linear between neighbours as in numpy; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def rounded(value: float | None) -> float | None:
    """``value`` with four decimals, as rows have it."""
    return None if value is None else round(value, 4)


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
