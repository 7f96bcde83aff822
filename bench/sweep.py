"""Throughput against batch size: runs every batch of a plan through an engine and gives one row for each.

A batch that does not fit becomes a row with the cause. Nothing here prints; rendering is in ``report.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from qkv_engine.errors import ConfigError, QKVError

from .preset_loop import measure_presets
from .provenance import Provenance, provenance
from .runs import BenchEngine, Runs
from .status import OK, QUEUED
from .watch import no_watch

if TYPE_CHECKING:
    from .filled import FilledEngine
    from .questions import Workload
    from .watch import Watch

RUN, SAMPLED = "run", "sampled"  # methods

OpenEngine = Callable[[str], AbstractContextManager["BenchEngine | FilledEngine"]]


class Method(Protocol):
    """A way to measure a batch."""

    def measure(self, engine: Any, kv: str, batch: int) -> dict[str, Any]:
        """Fields of the batch's row."""
        ...


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Settings of a sweep: every batch size with every KV preset; lengths are exact, in tokens."""

    model: str
    kvs: tuple[str, ...]
    batches: tuple[int, ...]
    own_batches: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of presets whose largest batch differs
    workload: Workload | None = None  # questions in place of random prompts; then the lengths below are not used
    input_len: int = 128
    output_len: int = 128
    repeats: int = 3
    warmup: int = 1
    seed: int = 0
    sampled: bool = False  # decode steps at a few contexts in place of whole runs
    preset: str | None = None  # the paper whose setting this is

    def batches_of(self, kv: str) -> tuple[int, ...]:
        """The batch sizes of one preset."""
        return self.own_batches.get(kv, self.batches)

    @property
    def num_rows(self) -> int:
        """Rows of a sweep of this plan."""
        return sum(len(self.batches_of(kv)) for kv in self.kvs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest request whose KV is kept: the last one sampled is never read."""
        return self.workload.num_tokens if self.workload else self.input_len + self.output_len - 1

    def __post_init__(self) -> None:
        least = {"input_len": 1, "output_len": 1, "repeats": 1, "warmup": 0, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"must be at least {low}", field=name, value=getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class SweepRow(Provenance):
    """One batch size with one KV preset: medians over the repeats, None where nothing was measured.

    ``output_tok_s_min`` and ``_max`` are the slowest and the fastest repeat. Memory, bits and counters are
    those of the repeat with the highest ``kv_bytes_peak``, which ``_codes``, ``_meta`` and ``_dense`` split.
    ``max_running`` requests ran at once. Of questions, ``right`` were answered correctly, ``same`` to the letter as
    with the first preset, and the lengths are means. ``method`` is "run" or "sampled". A sampled row has the mean
    step over the output in ``tpot_ms``, the KV that such a step reads in ``kv_bytes_read``, and in ``of_limit`` the
    least time that an H200 needs for it as a share of its time. ``preset`` is the paper whose setting was run.
    ``status`` is "ok", "queued" (the batch never ran all at once: memory was full, or the first requests ended before
    the prompts of the last had their turn), "does not fit" or "failed"; ``detail`` says why.
    """

    model: str
    preset: str | None = None
    task: str | None = None
    kv: str
    batch: int
    input_len: int
    output_len: int
    method: str = RUN
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
    kv_bytes_state: int | None = None
    kv_bytes_read: int | None = None
    weight_bytes: int | None = None
    of_limit: float | None = None
    effective_bits: float | None = None
    max_running: int | None = None
    demotions: int | None = None
    preemptions: int | None = None
    status: str
    detail: str | None = None


def sweep(
    plan: SweepPlan,
    open_engine: OpenEngine,
    *,
    watch: Watch = no_watch,
    describe: Callable[[QKVError], str] = str,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[SweepRow]:
    """Yields a row as soon as it is measured; ``watch`` is entered around every run, ``describe`` words errors.

    Engines and failures are those of ``measure_presets``.
    """
    method: Method = Runs(plan, watch, clock)
    if plan.sampled:
        from .sampled import Samples  # loads torch, which the command does with Ctrl-C held back

        method = Samples(plan, watch)
    batches = {kv: plan.batches_of(kv) for kv in plan.kvs}

    def begin(kv: str, engine: BenchEngine | FilledEngine) -> Callable[[int], SweepRow]:
        return lambda batch: _measured(plan, kv, batch, method.measure(engine, kv, batch))

    def failure(kv: str, batch: int, status: str, detail: str) -> SweepRow:
        return _row(plan, kv, batch, status=status, detail=detail)

    return measure_presets(batches, open_engine, begin, failure, describe)


def _measured(plan: SweepPlan, kv: str, batch: int, values: dict[str, Any]) -> SweepRow:
    most = values["max_running"]
    if most == batch:
        return _row(plan, kv, batch, status=OK, **values)
    detail = f"at most {most} requests ran at once: memory was full, or the first ended before the last began"
    return _row(plan, kv, batch, status=QUEUED, detail=detail, **values)


def _row(plan: SweepPlan, kv: str, batch: int, *, status: str, **values: Any) -> SweepRow:
    origin = provenance(seed=plan.seed) | {"input_len": plan.input_len, "output_len": plan.output_len}
    method = SAMPLED if plan.sampled else RUN
    named: dict[str, Any] = {"model": plan.model, "preset": plan.preset, "kv": kv, "batch": batch, "method": method}
    named["task"] = plan.workload and plan.workload.task.label
    return SweepRow(**named, status=status, **origin | values)
