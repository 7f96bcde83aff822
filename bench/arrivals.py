"""Requests that arrive one by one and are streamed: a row and a time series for every KV preset at every rate.

A run that does not fit or breaks is a row with the cause. Nothing here prints; tables are in ``arrivals_report.py``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qkv_engine.errors import ConfigError, QKVError, RequestError
from qkv_engine.request import RequestOutput, SamplingParams

from .arrivals_row import ArrivalsRow, Served, figures
from .grading import is_correct
from .preset_loop import measure_presets
from .provenance import engine_values, provenance
from .runs import BenchEngine, greedy, ordinary_tokens
from .series import StatsSample, sampled, thinned
from .watch import no_watch, work_of

if TYPE_CHECKING:
    from .load import Rate
    from .questions import Workload
    from .traces import Arrival
    from .watch import Watch


class StreamingEngine(BenchEngine, Protocol):
    """The part of ``Engine`` for a run with arrivals."""

    def generate_async(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[RequestOutput]: ...


OpenEngine = Callable[[str], AbstractContextManager[StreamingEngine]]


@dataclass(frozen=True, kw_only=True)
class ArrivalsPlan:
    """Settings of a measurement: the same ``requests`` at every rate with every KV preset.

    ``warmup`` runs, which do not count, come first on each engine, at the highest rate.
    """

    model: str
    kvs: tuple[str, ...]
    rates: tuple[Rate, ...]
    requests: tuple[Arrival, ...]
    workload: Workload | None = None  # the questions that ``requests`` are; otherwise prompts are random
    limits: Mapping[str, float] = field(default_factory=dict)  # in ms, by latency
    warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError("out of range", field="warmup", value=self.warmup, remedy="Give 0 or more")

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request whose KV is kept."""
        return max(request.num_tokens for request in self.requests)

    @property
    def highest_rate(self) -> Rate:
        return max(self.rates, key=lambda rate: rate.per_second or 0.0)


class Measured(NamedTuple):
    """A row, and the samples behind it, at least 20 ms apart; none where nothing ran."""

    row: ArrivalsRow
    series: list[StatsSample]


class _Requests(NamedTuple):
    """The requests of a plan as an engine takes them."""

    prompts: list[list[int]]
    params: list[SamplingParams]


def measure(
    plan: ArrivalsPlan,
    open_engine: OpenEngine,
    *,
    watch: Watch = no_watch,
    describe: Callable[[QKVError], str] = str,
) -> Iterator[Measured]:
    """Yields each row as soon as it is measured; ``watch`` is entered around every run, ``describe`` words errors.

    Engines and failures are those of ``measure_presets``.
    """
    return _Measurement(plan, open_engine, watch, describe).rows()


@dataclass
class _Measurement:
    plan: ArrivalsPlan
    open_engine: OpenEngine
    watch: Watch
    describe: Callable[[QKVError], str]

    def rows(self) -> Iterator[Measured]:
        rates = dict.fromkeys(self.plan.kvs, self.plan.rates)
        return measure_presets(rates, self.open_engine, self._begin, self._unmeasured, self.describe)

    def _begin(self, kv: str, engine: StreamingEngine) -> Callable[[Rate], Measured]:
        """The function that measures a rate on ``engine``, the first one behind the warm-up."""
        requests, warmup = self._requests(engine), self.plan.warmup

        def measured(rate: Rate) -> Measured:
            nonlocal warmup
            before, warmup = warmup, 0
            share = 1 / (before + 1)
            for _ in range(before):
                self._run(kv, self.plan.highest_rate, engine, requests, share)
            return self._run(kv, rate, engine, requests, share)

        return measured

    def _requests(self, engine: StreamingEngine) -> _Requests:
        if self.plan.workload is not None:
            asks = self.plan.workload.asks
            return _Requests([ask.prompt for ask in asks], [ask.params for ask in asks])
        rng, vocabulary = random.Random(f"prompts {self.plan.seed}"), ordinary_tokens(engine)
        prompts = [rng.choices(vocabulary, k=request.input_len) for request in self.plan.requests]
        return _Requests(prompts, [greedy(request.output_len) for request in self.plan.requests])

    def _run(self, kv: str, rate: Rate, engine: StreamingEngine, requests: _Requests, share: float) -> Measured:
        """One run of all requests; ``share`` is its part of a row."""
        work = work_of(f"{kv}, {rate.words}", *requests, share)
        times = rate.times(self.plan.requests, self.plan.seed)
        engine.reset_stats()
        with self.watch(work, engine), sampled(engine) as samples:
            served = asyncio.run(_serve_all(engine, requests, times, self.describe))
        stats = engine.stats()
        found = figures(served, samples, stats, self.plan.limits)
        row = self._row(kv, rate, **engine_values(stats, self.plan.seed), **found, right=self._num_right(served))
        return Measured(row, thinned(samples))

    def _num_right(self, served: Sequence[Served]) -> int | None:
        if self.plan.workload is None:
            return None
        pairs = zip(served, self.plan.workload.task.examples, strict=True)
        finished = [(one.output, example) for one, example in pairs if one.error is None]
        return sum(output is not None and is_correct(output.text, example.answer) for output, example in finished)

    def _unmeasured(self, kv: str, rate: Rate, status: str, detail: str) -> Measured:
        return Measured(self._row(kv, rate, **provenance(seed=self.plan.seed), status=status, detail=detail), [])

    def _row(self, kv: str, rate: Rate, **values: Any) -> ArrivalsRow:
        plan = self.plan
        asked = {
            "input_len": round(fmean(request.input_len for request in plan.requests), 1),
            "output_len": round(fmean(request.output_len for request in plan.requests), 1),
            "task": plan.workload and plan.workload.task.label,
            "limits": ",".join(f"{name}:{limit:g}" for name, limit in plan.limits.items()) or None,
        }
        fields = asked | values
        return ArrivalsRow(model=plan.model, kv=kv, rate=rate.label, requests=len(plan.requests), **fields)


async def _serve_all(
    engine: StreamingEngine, requests: _Requests, times: Sequence[float], describe: Callable[[QKVError], str]
) -> list[Served]:
    """All requests in one event loop, each sent at its time, in seconds from now."""
    begin = time.monotonic()

    async def serve(prompt: list[int], params: SamplingParams, at: float) -> Served:
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        sent, token_times, last = time.monotonic(), list[float](), None
        try:
            async for last in engine.generate_async(prompt, params):
                token_times += [time.monotonic()] * (len(last.token_ids) - len(token_times))
        except RequestError as error:
            return Served(sent, token_times, last, describe(error))
        return Served(sent, token_times, last, None if last is None else last.error)

    return list(await asyncio.gather(*map(serve, *requests, times)))
