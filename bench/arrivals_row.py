"""The row of a run with arrivals: throughput, latencies, memory and steps out of times, samples and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.request import RequestOutput

from .load import meets
from .provenance import Provenance
from .series import StatsSample, TimedStep, steps_of
from .status import FAILED, OK
from .timing import Timeline, percentile, rounded

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class ArrivalsRow(Provenance):
    """One KV preset at one rate; None where nothing was measured.

    Load
        ``rate`` is in requests a second, "inf" or "trace"; ``input_len`` and ``output_len`` are mean tokens.
        ``failed`` requests are in no rate and no latency. ``right`` answers were exact. ``seconds`` run from the first
        request sent to the last token, and all rates are per second of these. ``goodput`` counts requests that met
        ``limits``.

    Latency
        Mean and percentiles over the requests, of ITL over all gaps between tokens, as their reader saw them.

    Memory and steps
        ``max_running`` and ``max_waiting`` are the most sampled at one moment. ``decode_steps`` have single tokens
        alone, ``mixed_steps`` a prompt's tokens, too; before a ``_demoting`` one blocks stepped down. Steps that could
        not be told from their neighbours are not counted. ``status`` is "ok", "does not fit" or "failed"; ``detail``
        says why.
    """

    model: str
    task: str | None = None
    kv: str
    rate: str
    requests: int
    input_len: float
    output_len: float
    finished: int | None = None
    failed: int | None = None
    right: int | None = None
    seconds: float | None = None
    output_tok_s: float | None = None
    total_tok_s: float | None = None
    requests_s: float | None = None
    limits: str | None = None
    goodput: float | None = None
    ttft_ms_mean: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p90: float | None = None
    ttft_ms_p99: float | None = None
    tpot_ms_mean: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p90: float | None = None
    tpot_ms_p99: float | None = None
    itl_ms_mean: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p90: float | None = None
    itl_ms_p99: float | None = None
    e2e_ms_mean: float | None = None
    e2e_ms_p50: float | None = None
    e2e_ms_p90: float | None = None
    e2e_ms_p99: float | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    preemptions: int | None = None
    demotions: int | None = None
    lowest_bits: float | None = None
    effective_bits: float | None = None
    kv_bytes_total: int | None = None
    kv_bytes_peak: int | None = None
    kv_bytes_reserve: int | None = None
    decode_steps: int | None = None
    decode_steps_ms_p50: float | None = None
    decode_steps_ms_p99: float | None = None
    decode_steps_demoting: int | None = None
    decode_steps_demoting_ms_p50: float | None = None
    decode_steps_demoting_ms_p99: float | None = None
    mixed_steps: int | None = None
    mixed_steps_ms_p50: float | None = None
    mixed_steps_ms_p99: float | None = None
    mixed_steps_demoting: int | None = None
    mixed_steps_demoting_ms_p50: float | None = None
    mixed_steps_demoting_ms_p99: float | None = None
    status: str
    detail: str | None = None


class Served(NamedTuple):
    """A request's end as its reader saw it: when it was sent, when each token came, and the last output or an error.

    Times are in seconds of one clock. Tokens that came together have one time.
    """

    sent: float
    token_times: list[float]
    output: RequestOutput | None
    error: str | None = None

    @property
    def timeline(self) -> Timeline:
        """The times of a request that finished."""
        return Timeline.read(self.sent, self.token_times)


def figures(
    served: Sequence[Served], samples: Sequence[StatsSample], stats: EngineStats, limits: Mapping[str, float]
) -> dict[str, Any]:
    """The fields of a row that say how a run went; ``samples`` and ``stats`` count from its start."""
    finished = [one for one in served if one.error is None]
    errors = [one.error for one in served if one.error is not None]
    steps = steps_of(samples, runs_ahead=stats.device != "cpu")
    return {
        "finished": len(finished),
        "failed": len(errors),
        **throughput(finished, limits),
        **latencies([one.timeline for one in finished]),
        "max_running": max(sample.running for sample in samples),
        "max_waiting": max(sample.waiting for sample in samples),
        "lowest_bits": min((b for one in finished if (b := _lowest_bits(one)) is not None), default=None),
        "kv_bytes_peak": stats.kv_bytes_peak,
        "kv_bytes_reserve": stats.kv_bytes_reserve,
        **step_times("decode_steps", [step for step in steps if not step.prompt_tokens]),
        **step_times("mixed_steps", [step for step in steps if step.prompt_tokens]),
        "status": FAILED if errors else OK,
        "detail": errors[0] if errors else None,
    }


def throughput(finished: Sequence[Served], limits: Mapping[str, float]) -> dict[str, float | None]:
    """Rates from the first request sent to the last token; nothing if none finished."""
    if not finished:
        return {}
    timelines = [one.timeline for one in finished]
    seconds = max(t.last_token for t in timelines) - min(t.sent for t in timelines)
    output_tokens = sum(t.num_tokens for t in timelines)
    prompt_tokens = sum(len(one.output.prompt_token_ids) for one in finished if one.output is not None)
    good = sum(meets(t, limits) for t in timelines)
    return {
        "output_len": round(output_tokens / len(finished), 1),
        "seconds": rounded(seconds),
        "output_tok_s": rounded(output_tokens / seconds),
        "total_tok_s": rounded((prompt_tokens + output_tokens) / seconds),
        "requests_s": rounded(len(finished) / seconds),
        "goodput": rounded(good / seconds) if limits else None,
    }


def latencies(timelines: Sequence[Timeline]) -> dict[str, float | None]:
    """Mean and percentiles of TTFT, TPOT, ITL and end-to-end latency in ms."""
    seconds = {
        "ttft": [t.ttft for t in timelines],
        "tpot": [tpot for t in timelines if (tpot := t.tpot) is not None],
        "itl": [gap for t in timelines for gap in t.gaps],
        "e2e": [t.e2e for t in timelines],
    }
    found: dict[str, float | None] = {}
    for name, values in seconds.items():
        ms = [1e3 * value for value in values]
        found[f"{name}_ms_mean"] = rounded(fmean(ms) if ms else None)
        found |= {f"{name}_ms_p{p}": rounded(percentile(ms, p)) for p in PERCENTILES}
    return found


def step_times(name: str, steps: Sequence[TimedStep]) -> dict[str, float | None]:
    """Number, p50 and p99 in ms of the steps without demotions, and of those with some."""
    found: dict[str, float | None] = {}
    for field, is_demoting in ((name, False), (f"{name}_demoting", True)):
        ms = [step.ms for step in steps if bool(step.demotions) == is_demoting]
        found[field] = len(ms)
        found |= {f"{field}_ms_p{p}": rounded(percentile(ms, p)) for p in (50, 99)}
    return found


def _lowest_bits(served: Served) -> float | None:
    return None if served.output is None else served.output.kv.lowest_bits
