"""Throughput against batch size: runs every batch of a plan through an engine and gives one row for each.

What does not fit becomes a row that says so. Nothing here prints; rendering is in ``report.py``.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qkv_engine.errors import CapacityError, ConfigError, ModelError, QKVError
from qkv_engine.request import RequestOutput, SamplingParams

from .grading import score
from .provenance import Provenance, provenance
from .timing import RunFigures, Timeline, median, run_figures
from .watch import no_watch, work_of

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.text.tokenizer import Tokenizer

    from .questions import Workload
    from .watch import Watch

OK, QUEUED, NO_FIT, FAILED = "ok", "queued", "does not fit", "failed"
MAX_REQUESTS = 4096


class BenchEngine(AbstractContextManager["BenchEngine"], Protocol):
    """What a sweep needs of ``Engine``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def reset_stats(self) -> None: ...


OpenEngine = Callable[[str], AbstractContextManager[BenchEngine]]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What to measure: every batch size with every KV preset; lengths are exact, in tokens."""

    model: str
    kvs: tuple[str, ...]
    batches: tuple[int, ...]
    workload: Workload | None = None  # questions in place of random prompts; then the lengths below are not used
    input_len: int = 128
    output_len: int = 128
    repeats: int = 3
    warmup: int = 1
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request whose KV is kept: the last one sampled is never read."""
        return self.workload.num_tokens if self.workload else self.input_len + self.output_len - 1

    def __post_init__(self) -> None:
        least = {"input_len": 1, "output_len": 1, "repeats": 1, "warmup": 0, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"must be at least {low}", field=name, value=getattr(self, name))


def parse_batches(text: str) -> tuple[int, ...]:
    """Batch sizes of "1,2,4", of "1..64" (doubling, both ends included), or of both; repeated ones once."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:\.\.\s*(\d{1,6})\s*)?", part, re.ASCII)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last:
            remedy = 'Give a list such as "1,2,4" or a range such as "1..64"'
            raise ConfigError("not batch sizes", field="batch_sweep", value=text, remedy=remedy)
        while first < last:
            sizes.append(first)
            first *= 2
        sizes.append(last)
    return tuple(dict.fromkeys(sizes))


def parse_requests(size: str | None) -> int | None:
    """The number in "8x", which asks for memory in requests; None for any other size. Raises ``ConfigError``."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*x\s*", size or "", re.ASCII | re.IGNORECASE)
    if match is None:
        return None
    if not 1 <= int(match[1]) <= MAX_REQUESTS:
        remedy = f"Give from 1x to {MAX_REQUESTS}x"
        raise ConfigError("not a number of requests", field="kv_memory", value=size, remedy=remedy)
    return int(match[1])


@dataclass(frozen=True, kw_only=True)
class Row(Provenance):
    """One batch size with one KV preset: medians over the repeats, None where there is nothing to tell.

    ``output_tok_s_min`` and ``_max`` are the slowest and the fastest repeat. Memory, bits and counters are
    those of the repeat with the highest ``kv_bytes_peak``, which ``_codes``, ``_meta`` and ``_dense`` split.
    ``max_running`` requests ran at once. Of questions, ``right`` were answered correctly, ``same`` to the letter as
    with the first preset, and the lengths are means. ``status`` is "ok", "queued" (the batch did not fit at once
    and ran part after part), "does not fit" or "failed"; ``detail`` says why.
    """

    model: str
    task: str | None = None
    kv: str
    batch: int
    input_len: int
    output_len: int
    repeats: int = 0
    finished: int | None = None
    right: int | None = None
    same: int | None = None
    seconds: float | None = None
    output_tok_s: float | None = None
    output_tok_s_min: float | None = None
    output_tok_s_max: float | None = None
    total_tok_s: float | None = None
    decode_tok_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    itl_p99_ms: float | None = None
    kv_bytes_total: int | None = None
    kv_bytes_peak: int | None = None
    kv_bytes_codes: int | None = None
    kv_bytes_meta: int | None = None
    kv_bytes_dense: int | None = None
    effective_bits: float | None = None
    max_running: int | None = None
    demotions: int | None = None
    preemptions: int | None = None
    status: str
    detail: str | None = None


class Run(NamedTuple):
    figures: RunFigures
    stats: EngineStats
    outputs: list[RequestOutput]
    seconds: float


def sweep(
    plan: SweepPlan,
    open_engine: OpenEngine,
    *,
    watch: Watch = no_watch,
    describe: Callable[[QKVError], str] = str,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """Yields a row as soon as it is measured; ``watch`` is entered around every run, ``describe`` words errors.

    One engine a preset, opened by ``open_engine`` and closed before the next. Raises ``ConfigError`` and
    ``ModelError``, which no other batch size would cure; every other failure is a row.
    """
    return _Sweep(plan, open_engine, watch, describe, clock).rows()


@dataclass
class _Sweep:
    plan: SweepPlan
    open_engine: OpenEngine
    watch: Watch
    describe: Callable[[QKVError], str]
    clock: Callable[[], float]
    first_replies: dict[int, list[str]] = field(default_factory=dict)  # by batch, of the first preset

    def rows(self) -> Iterator[Row]:
        for kv in self.plan.kvs:
            batches = list(self.plan.batches)
            while batches:
                try:
                    with self.open_engine(kv) as engine:
                        yield from self._sizes(kv, batches, engine)
                except CapacityError as error:
                    yield from (
                        _row(self.plan, kv, batch, status=NO_FIT, detail=self.describe(error)) for batch in batches
                    )
                    break

    def _sizes(self, kv: str, batches: list[int], engine: BenchEngine) -> Iterator[Row]:
        """Takes sizes off ``batches`` until none is left or one fails: then the engine is in doubt."""
        while batches:
            row = self._size(kv, batches.pop(0), engine)
            yield row
            if row.status == FAILED:
                return

    def _size(self, kv: str, batch: int, engine: BenchEngine) -> Row:
        runs = []
        try:
            for index in range(self.plan.warmup + self.plan.repeats):
                runs.append(self._run(kv, batch, index, engine))
        except CapacityError as error:
            return _row(self.plan, kv, batch, status=NO_FIT, detail=self.describe(error))
        except (ConfigError, ModelError):
            raise
        except (QKVError, RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
            detail = self.describe(error) if isinstance(error, QKVError) else f"{type(error).__name__}: {error}"
            return _row(self.plan, kv, batch, status=FAILED, detail=detail)
        runs = runs[self.plan.warmup :]
        row = _summary(self.plan, kv, batch, runs)
        return row if self.plan.workload is None else self._graded(row, self.plan.workload, runs[-1].outputs)

    def _run(self, kv: str, batch: int, index: int, engine: BenchEngine) -> Run:
        """One timed run of ``batch`` greedy requests."""
        prompts, params = self._requests(batch, index, engine)
        share = 1 / (self.plan.warmup + self.plan.repeats)
        work = work_of(f"{kv}, batch {batch:,}", prompts, params, share)
        engine.reset_stats()
        with self.watch(work, engine):
            start = self.clock()
            outputs = engine.generate(prompts, params)
            seconds = self.clock() - start
        timelines = [timeline(output, None if self.plan.workload else self.plan.output_len) for output in outputs]
        figures = run_figures(timelines, num_prompt_tokens=sum(map(len, prompts)), seconds=seconds)
        return Run(figures, engine.stats(), outputs, seconds)

    def _requests(
        self, batch: int, index: int, engine: BenchEngine
    ) -> tuple[list[list[int]], SamplingParams | list[SamplingParams]]:
        """Questions, or random prompts with outputs of exactly ``output_len`` tokens."""
        plan = self.plan
        if plan.workload is not None:
            asks = plan.workload.asks[:batch]
            return [ask.prompt for ask in asks], [ask.params for ask in asks]
        # New prompts for every run: the KV of an earlier one must not be found again.
        seed = f"{plan.seed} {batch} {index}"
        return random_prompts(ordinary_tokens(engine), batch, plan.input_len, seed), greedy(plan.output_len)

    def _graded(self, row: Row, workload: Workload, outputs: list[RequestOutput]) -> Row:
        replies = [output.text for output in outputs]
        first = self.first_replies.setdefault(row.batch, replies)
        return replace(
            row,
            task=workload.task.label,
            finished=sum(output.finished for output in outputs),
            right=score(replies, list(workload.task.examples[: row.batch])).correct,
            same=sum(map(str.__eq__, replies, first)),
            input_len=round(fmean(len(output.prompt_token_ids) for output in outputs)),
            output_len=round(fmean(len(output.outputs[0].token_ids) for output in outputs)),
        )


def greedy(output_len: int) -> SamplingParams:
    """Exactly ``output_len`` greedy tokens, as ids only."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


def ordinary_tokens(engine: BenchEngine) -> list[int]:
    """The token ids of the vocabulary that are not special."""
    special = frozenset() if engine.tokenizer is None else engine.tokenizer.special_ids
    return [token for token in range(engine.vocab_size) if token not in special]


def random_prompts(vocabulary: Sequence[int], batch: int, length: int, seed: str) -> list[list[int]]:
    """``batch`` prompts of ``length`` random tokens out of ``vocabulary``; the same for the same ``seed``."""
    rng = random.Random(seed)
    return [rng.choices(vocabulary, k=length) for _ in range(batch)]


def timeline(output: RequestOutput, output_len: int | None) -> Timeline:
    """The times of a finished request. Raises ``RuntimeError`` if it failed or has not given ``output_len`` tokens."""
    metrics, completion = output.metrics, output.outputs[0]
    num_tokens = len(completion.token_ids)
    if output.error or num_tokens != (output_len or num_tokens):
        reason = output.error or completion.finish_reason
        raise RuntimeError(f"a request gave {num_tokens} of {output_len or 'its'} tokens: {reason}")
    assert metrics.first_token_time is not None and metrics.last_token_time is not None
    return Timeline(
        sent=metrics.arrival_time,
        scheduled=metrics.first_scheduled_time or metrics.arrival_time,
        first_token=metrics.first_token_time,
        last_token=metrics.last_token_time,
        num_tokens=num_tokens,
        token_times=metrics.token_times,
    )


def _row(plan: SweepPlan, kv: str, batch: int, *, status: str, **values: Any) -> Row:
    values = provenance(seed=plan.seed) | {"input_len": plan.input_len, "output_len": plan.output_len} | values
    return Row(model=plan.model, kv=kv, batch=batch, status=status, **values)


def _summary(plan: SweepPlan, kv: str, batch: int, runs: Sequence[Run]) -> Row:
    """The row of a batch size that ran: medians over ``runs``."""
    figures = [run.figures for run in runs]
    rates = [figure.output_tok_s for figure in figures]
    medians = ("output_tok_s", "total_tok_s", "decode_tok_s", "ttft_ms", "tpot_ms", "itl_ms", "itl_p99_ms")
    values = {name: _rounded(median(getattr(figure, name) for figure in figures)) for name in medians}
    stats = max((run.stats for run in runs), key=lambda stats: stats.kv_bytes_peak)
    kept = ("kv_bytes_total", "kv_bytes_peak", "kv_bytes_codes", "kv_bytes_meta", "kv_bytes_dense")
    max_running = min(figure.max_running for figure in figures)
    return _row(
        plan,
        kv,
        batch,
        status=OK if max_running == batch else QUEUED,
        detail=None if max_running == batch else f"at most {max_running} requests ran at once",
        **provenance(device=stats.device, dtype=stats.dtype, threads=stats.num_threads, seed=plan.seed),
        repeats=len(runs),
        seconds=_rounded(median(run.seconds for run in runs)),
        output_tok_s_min=_rounded(min(rates)),
        output_tok_s_max=_rounded(max(rates)),
        **values,
        **{name: getattr(stats, name) for name in kept},
        effective_bits=_rounded(stats.effective_bits),
        max_running=max_running,
        demotions=stats.num_demotions,
        preemptions=stats.num_preemptions,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
