"""An engine watched while it serves: counters sampled between its steps, and what the steps of each kind took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple

from qkv_engine.errors import QKVError

from .watch import Watched

if TYPE_CHECKING:
    from qkv_engine.metrics import EngineStats

# Seconds between two samples. An engine answers between two steps, so that every step of more than this is seen alone.
SAMPLE_SECONDS = 0.002
SERIES_SECONDS = 0.02  # between two samples of a picture or a file, at least


class StatsSample(NamedTuple):
    """Load, KV memory and counters at a moment, in seconds of one clock; ``blocks`` are live ones by rung."""

    seconds: float
    running: int
    waiting: int
    blocks: dict[str, int]
    kv_bytes_free: int
    steps: int
    demotions: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int

    @classmethod
    def of(cls, stats: EngineStats) -> StatsSample:
        return cls(
            stats.time,
            stats.num_running,
            stats.num_waiting,
            stats.kv_blocks,
            stats.kv_bytes_total - stats.kv_bytes_used - stats.kv_bytes_cached,
            stats.num_steps,
            stats.num_demotions + stats.num_idle_demotions,
            stats.num_preemptions,
            stats.prompt_tokens,
            stats.generation_tokens,
        )


class TimedStep(NamedTuple):
    """A step's time in ms, the prompt tokens it computed and the blocks that stepped down for it."""

    ms: float
    prompt_tokens: int
    demotions: int


@contextmanager
def sampled(engine: Watched) -> Iterator[list[StatsSample]]:
    """Samples of ``engine`` in the block, by a thread of its own: waiting for a step must not hold an event loop up."""
    samples, ended = [StatsSample.of(engine.stats())], Event()

    def watch() -> None:
        with suppress(QKVError):  # the work itself reports what broke
            while not ended.wait(SAMPLE_SECONDS):
                samples.append(StatsSample.of(engine.stats()))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
    samples.append(StatsSample.of(engine.stats()))


def steps_of(samples: Sequence[StatsSample], *, runs_ahead: bool) -> list[TimedStep]:
    """The steps that lie alone between two samples, apart from those that began when nothing ran.

    ``runs_ahead``: the engine waits for one step's results while it has launched the next, as on a GPU. Blocks that
    step down are counted at the launch, prompt tokens with the results.
    """
    launches = [after.steps - before.steps for before, after in pairwise(samples)]
    demotions = [after.demotions - before.demotions for before, after in pairwise(samples)]
    found = []
    for i in range(1, len(launches)):
        before, after, launched = samples[i], samples[i + 1], i - runs_ahead
        if before.running and launches[i] == 1 and launches[launched] == 1:
            ms = 1e3 * (after.seconds - before.seconds)
            found.append(TimedStep(ms, after.prompt_tokens - before.prompt_tokens, demotions[launched]))
    return found


def thinned(samples: Sequence[StatsSample]) -> list[StatsSample]:
    """Samples at least 20 ms apart, and the last one, with seconds from the first on."""
    found: list[StatsSample] = []
    for sample in samples:
        seconds = sample.seconds - samples[0].seconds
        if not found or sample is samples[-1] or seconds - found[-1].seconds >= SERIES_SECONDS:
            found.append(sample._replace(seconds=seconds))
    return found
