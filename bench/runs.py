"""Whole runs of a batch: random prompts or questions handed over at once, and timed to their last token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qkv_engine.request import RequestOutput, SamplingParams

from .grading import grade
from .provenance import engine_values
from .timing import RunFigures, Timeline, median, rounded, run_figures
from .watch import Watch, no_watch, work_of

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats
    from qkv_engine.text.tokenizer import Tokenizer

    from .questions import Workload
    from .sweep import SweepPlan


class BenchEngine(Protocol):
    """The part of ``Engine`` for a run."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    def reset_stats(self) -> None: ...


class Run(NamedTuple):
    figures: RunFigures
    stats: EngineStats
    outputs: list[RequestOutput]
    seconds: float


@dataclass
class Runs:
    """Measures a batch by whole runs; a figure is the median over the repeats of ``plan``."""

    plan: SweepPlan
    watch: Watch = no_watch
    clock: Callable[[], float] = time.monotonic
    first_replies: dict[int, list[str]] = field(default_factory=dict)  # by batch, of the first preset

    def measure(self, engine: BenchEngine, kv: str, batch: int) -> dict[str, Any]:
        """Fields of the row of ``batch`` requests."""
        runs = [self._run(engine, kv, batch, index) for index in range(self.plan.warmup + self.plan.repeats)]
        runs = runs[self.plan.warmup :]
        graded = {} if self.plan.workload is None else self._graded(self.plan.workload, batch, runs[-1].outputs)
        return _summary(runs, self.plan.seed) | graded

    def _run(self, engine: BenchEngine, kv: str, batch: int, index: int) -> Run:
        """One timed run of ``batch`` greedy requests."""
        prompts, params = self._requests(engine, batch, index)
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
        self, engine: BenchEngine, batch: int, index: int
    ) -> tuple[list[list[int]], SamplingParams | list[SamplingParams]]:
        """Questions, or random prompts with outputs of exactly ``output_len`` tokens."""
        plan = self.plan
        if plan.workload is not None:
            asks = plan.workload.asks[:batch]
            return [ask.prompt for ask in asks], [ask.params for ask in asks]
        # New prompts for every run: the KV of an earlier one must not be found again.
        seed = f"{plan.seed} {batch} {index}"
        return random_prompts(ordinary_tokens(engine), batch, plan.input_len, seed), greedy(plan.output_len)

    def _graded(self, workload: Workload, batch: int, outputs: list[RequestOutput]) -> dict[str, Any]:
        replies = [output.text for output in outputs]
        first = self.first_replies.setdefault(batch, replies)
        return {
            "finished": sum(output.finished for output in outputs),
            "right": grade(replies, list(workload.task.examples[:batch])).correct,
            "same": sum(map(str.__eq__, replies, first)),
            "input_len": round(fmean(len(output.prompt_token_ids) for output in outputs)),
            "output_len": round(fmean(len(output.outputs[0].token_ids) for output in outputs)),
        }


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


def _summary(runs: Sequence[Run], seed: int) -> dict[str, Any]:
    """Medians over ``runs``; memory is that of the run with the highest peak."""
    figures = [run.figures for run in runs]
    rates = [figure.output_tok_s for figure in figures]
    medians = ("output_tok_s", "total_tok_s", "decode_tok_s", "ttft_ms", "tpot_ms", "itl_ms", "itl_p99_ms")
    return {
        **{name: rounded(median(getattr(figure, name) for figure in figures)) for name in medians},
        **memory_values(max((run.stats for run in runs), key=lambda stats: stats.kv_bytes_peak), seed),
        "repeats": len(runs),
        "seconds": rounded(median(run.seconds for run in runs)),
        "output_tok_s_min": rounded(min(rates)),
        "output_tok_s_max": rounded(max(rates)),
        "max_running": min(figure.max_running for figure in figures),
    }


def memory_values(stats: EngineStats, seed: int) -> dict[str, Any]:
    """``engine_values``, and the peak of KV memory in parts."""
    parts = ("kv_bytes_peak", "kv_bytes_codes", "kv_bytes_meta", "kv_bytes_dense", "kv_bytes_state")
    return engine_values(stats, seed) | {name: getattr(stats, name) for name in parts}
