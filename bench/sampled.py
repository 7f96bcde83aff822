"""Decode throughput without the prompts: steps timed at a few contexts over the output.

A run of prompts that grow to long contexts would spend its time on prompts. KV memory is filled in their place
(``filled.py``), the engine's own decode steps are timed there, and the mean over the contexts is the mean over the
output, since a step's time grows linearly with the context. Under pressure it does not: it jumps where blocks step
down, which few contexts may miss, and only a full run tells the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from qkv_engine.errors import CapacityError, ConfigError

from .filled import FilledEngine, spread_prompts
from .roofline import GPU, count_weights, limit_seconds
from .runs import memory_values
from .sizing import largest_batch
from .timing import rounded
from .watch import Watch, Work, no_watch

if TYPE_CHECKING:
    from .sweep import SweepPlan

POINTS, STEPS = 3, 40  # contexts at which steps are timed, and steps at each; fewer where the output is short
WARMUP_STEPS, WINDOWS = 4, 5  # before the timed steps, and pieces in which these are timed
FEWEST_TOKENS = 2 * (1 + WARMUP_STEPS + WINDOWS)  # of an output that has room for a sample


class Window(NamedTuple):
    """Steps timed together: seconds of one, and the bytes of KV that it read."""

    seconds: float
    kv_nbytes: float


@dataclass
class Samples:
    """Measures a batch by its decode steps at a few contexts; the mean over them is that over the output.

    Raises ``ConfigError`` for an output too short to be sampled.
    """

    plan: SweepPlan
    watch: Watch = no_watch

    def __post_init__(self) -> None:
        if self.plan.output_len < FEWEST_TOKENS:
            remedy = f"Give at least {FEWEST_TOKENS}, or leave --sampled out"
            raise ConfigError("too short to be sampled", field="output_len", value=self.plan.output_len, remedy=remedy)

    def measure(self, engine: FilledEngine, kv: str, batch: int) -> dict[str, Any]:
        """Fields of the row of ``batch`` requests. Raises ``CapacityError`` if they do not fit at once."""
        most = largest_batch(engine.cache.ladder, engine.cache.nbytes, self.plan.num_tokens)
        if batch > most:
            raise CapacityError(f"at most {most} requests of {self.plan.num_tokens:,} tokens fit at once")
        contexts, steps = sample_contexts(self.plan.input_len, self.plan.output_len)
        work = Work(f"{kv}, batch {batch:,}", batch, 0, batch * steps, 1 / len(contexts))
        pieces = []
        for context in contexts:
            with self.watch(work, engine):
                pieces.append(self._sample(engine, context, batch, steps))
        values = self._summary(engine, batch, pieces)
        engine.end()
        return values

    def _sample(self, engine: FilledEngine, at: int, batch: int, steps: int) -> list[Window]:
        """Steps of ``batch`` requests around the context ``at``, each with room for the whole output."""
        engine.end()
        before = 1 + WARMUP_STEPS + steps // 2  # the first step is taken while the batch starts
        longest = self.plan.num_tokens - 1 - WARMUP_STEPS - steps
        engine.begin(spread_prompts(batch, at - before, longest), self.plan.num_tokens)
        engine.seconds_per_step(WARMUP_STEPS)
        sizes = [steps * (i + 1) // WINDOWS - steps * i // WINDOWS for i in range(WINDOWS)]
        return [_window(engine, size) for size in sizes]

    def _summary(self, engine: FilledEngine, batch: int, pieces: list[list[Window]]) -> dict[str, Any]:
        """The fields from the windows of each context; memory and counters are those of the last context's steps."""
        # The median piece, so that a graph captured meanwhile does not count.
        seconds = fmean(median(w.seconds for w in piece) for piece in pieces)
        # Within a point windows differ by chance, between points by design: the spread is that of the points' means,
        # without the slowest and the fastest window, in which a kernel may have been compiled.
        ordered = [sorted(w.seconds for w in piece)[1:-1] for piece in pieces]
        slow, fast = fmean(each[-1] for each in ordered), fmean(each[0] for each in ordered)
        values = memory_values(engine.stats(), self.plan.seed)
        weights = count_weights(engine.started.config, engine.started.dtype, engine.started.device)
        kv_read = fmean(w.kv_nbytes for piece in pieces for w in piece)
        limit = limit_seconds(weights, batch, kv_read) if GPU in values["device_name"] else None
        return values | {
            "repeats": WINDOWS,
            "output_tok_s": rounded(batch / seconds),
            "output_tok_s_min": rounded(batch / slow),
            "output_tok_s_max": rounded(batch / fast),
            "decode_tok_s": rounded(batch / seconds),
            "tpot_ms": rounded(1e3 * seconds),
            "kv_bytes_read": round(kv_read),
            "weight_bytes": weights.nbytes,
            "of_limit": None if limit is None else rounded(limit / seconds),
            "max_running": batch,
        }


def sample_contexts(input_len: int, output_len: int) -> tuple[list[int], int]:
    """Contexts at which steps are timed, the middles of equal parts of the output, and the number of steps at each."""
    number = max(1, min(POINTS, output_len // (2 * (1 + WARMUP_STEPS) + STEPS)))
    part = output_len / number
    steps = min(STEPS, 2 * (int(part) // 2 - 1 - WARMUP_STEPS))
    return [round(input_len + (i + 0.5) * part) for i in range(number)], steps


def _window(engine: FilledEngine, steps: int) -> Window:
    before = engine.kv_nbytes_read()
    seconds = engine.seconds_per_step(steps)
    return Window(seconds, (before + engine.kv_nbytes_read()) / 2)
