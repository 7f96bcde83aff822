"""Times decode steps at a context: sampled over filled KV memory, or every step of a full run.

Nothing here prints; the command is in ``decode.py``.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from qkv_engine.bench.provenance import provenance
from qkv_engine.bench.sizing import make_ladder, planned_cache
from qkv_engine.bench.sweep import FAILED, NO_FIT, OK, Row, parse_batches
from qkv_engine.config import EngineConfig, resolve_kv
from qkv_engine.errors import CapacityError, ConfigError, QKVError
from qkv_engine.kv.ladder import Ladder
from qkv_engine.kv.manager import KVManager
from qkv_engine.models.config import DTYPES, ModelConfig
from qkv_engine.models.shapes import SHAPES
from qkv_engine.request import Request, SamplingParams
from qkv_engine.startup import Started, resolve_device, start

from .filled import FilledCore, spread_prompts
from .roofline import Weights, bytes_seconds, count_weights, limit_seconds

SAMPLED, FULL = "sampled", "full run"
WARMUP_STEPS, WINDOWS = 4, 5  # steps before the timed ones, and pieces in which the timed ones are measured
FULL_WINDOWS = 16  # pieces of a full run; more show more of its spread
MAX_BATCH = 4096  # requests that an engine may run


@dataclass(frozen=True, kw_only=True)
class DecodeRow(Row):
    """One batch that decodes to ``context`` tokens a request: the mean over ``output_len`` tokens of each.

    ``step_ms`` is the mean step, ``steps`` were timed at ``points`` contexts, and the slowest and the fastest piece
    give ``output_tok_s_min`` and ``_max``. ``of_roofline`` compares the step with the time its bytes take (weights and
    KV, 4.3e12 B/s), ``of_limit`` counts matrix products by their arithmetic where that takes longer; on a GPU only.
    ``vs_best`` is the ratio to the first preset's best row of this context.
    """

    context: int
    method: str
    points: int = 0
    steps: int = 0
    step_ms: float | None = None
    weight_bytes: int = 0
    kv_bytes_read: int | None = None
    of_roofline: float | None = None
    of_limit: float | None = None
    vs_best: float | None = None


class Plan(NamedTuple):
    """A measurement to run, in tokens; ``batches`` may say "max", the largest batch that fits."""

    shape: str
    kvs: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: str
    output_len: int
    memory: int
    points: int
    steps: int
    full: bool
    dtype: str
    device: str
    seed: int


class Window(NamedTuple):
    """Steps timed together: their number, seconds of each, and the bytes of KV that each read."""

    steps: int
    seconds: float
    kv_nbytes: float


class Subject(NamedTuple):
    """The inputs of a preset's measurement: memory for KV, and sizes by context."""

    kv: str
    kv_nbytes: int
    largest: dict[int, int]
    batches: dict[int, tuple[int, ...]]


def run(plan: Plan) -> Iterator[DecodeRow]:
    """Yields a row as soon as it is measured. Raises ``ConfigError``; every other failure is a row."""
    config, device = ModelConfig.from_hf(SHAPES[plan.shape]), resolve_device(plan.device)
    dtype = weight_dtype(plan, config, device)
    weights = count_weights(config, dtype)
    for kv in plan.kvs:
        subject = size(plan, kv, config, dtype, plan.memory - weights.nbytes)
        for context in plan.contexts:
            for batch in subject.batches[context]:
                if batch > subject.largest[context]:
                    detail = f"{subject.largest[context]} requests fit"
                    yield _row(plan, kv, context, batch, status=NO_FIT, detail=detail)
        yield from _measured(plan, subject, weights)


def _measured(plan: Plan, subject: Subject, weights: Weights) -> Iterator[DecodeRow]:
    """The rows that fit, on one engine as long as it works."""
    sizes = [(c, b) for c in plan.contexts for b in subject.batches[c] if b <= subject.largest[c]]
    while sizes:
        started = None
        try:
            started = start(engine_config(plan, subject, max(batch for _, batch in sizes)))
            core = FilledCore(started, fill=not plan.full)
            while sizes:
                context, batch = sizes[0]
                row = _measure(plan, core, subject.kv, context, batch, weights)
                sizes.pop(0)
                yield _described(row, started, plan.seed)
        except CapacityError as error:
            yield from (_row(plan, subject.kv, c, b, status=NO_FIT, detail=str(error)) for c, b in sizes)
            return
        except ConfigError:
            raise
        except (QKVError, RuntimeError, MemoryError) as error:  # torch's out of memory is a RuntimeError
            context, batch = sizes.pop(0)
            detail = f"{type(error).__name__}: {error}"
            yield _row(plan, subject.kv, context, batch, status=FAILED, detail=detail)
        finally:
            if started is not None:
                free(started)


def _measure(plan: Plan, core: FilledCore, kv: str, context: int, batch: int, weights: Weights) -> DecodeRow:
    core.end()
    if plan.full:
        pieces = [_full_run(core, context, batch, plan.output_len)]
    else:
        pieces = [_sample(core, at, context, batch, plan.steps) for at in sample_contexts(context, plan)]
    row = _summary(plan, core, kv, context, batch, pieces, weights)
    core.end()
    return row


def sample_contexts(context: int, plan: Plan) -> list[int]:
    """Contexts at which steps are timed: the middles of ``points`` equal parts of the output."""
    part = plan.output_len / plan.points
    return [round(context - plan.output_len + (i + 0.5) * part) for i in range(plan.points)]


def _sample(core: FilledCore, at: int, context: int, batch: int, steps: int) -> list[Window]:
    """Steps of ``batch`` requests around the context ``at``; each request has room for ``context`` tokens."""
    core.end()
    before = 1 + WARMUP_STEPS + steps // 2  # the first step is taken while the batch starts
    longest = context - 1 - WARMUP_STEPS - steps
    core.start(spread_prompts(batch, at - before, longest), context)
    core.seconds_per_step(WARMUP_STEPS)
    sizes = [steps * (i + 1) // WINDOWS - steps * i // WINDOWS for i in range(WINDOWS)]
    return [_window(core, size) for size in sizes if size]


def _full_run(core: FilledCore, context: int, batch: int, output_len: int) -> list[Window]:
    """All steps in which the whole batch decodes, after its prompts were computed."""
    core.start([context - output_len] * batch, context)
    left = min(r.max_tokens - r.num_output_tokens for r in core.running) - 1
    if left < 1:
        raise QKVError("requests ended before the last one began", remedy="Raise --output-len")
    sizes = [left * (i + 1) // FULL_WINDOWS - left * i // FULL_WINDOWS for i in range(FULL_WINDOWS)]
    return [_window(core, size) for size in sizes if size]


def _window(core: FilledCore, steps: int) -> Window:
    before = core.kv_nbytes_read()
    seconds = core.seconds_per_step(steps)
    return Window(steps, seconds, (before + core.kv_nbytes_read()) / 2)


def _summary(
    plan: Plan, core: FilledCore, kv: str, context: int, batch: int, pieces: list[list[Window]], weights: Weights
) -> DecodeRow:
    """The row of some points of the run, of equal weight, with the windows of each."""
    windows = [window for piece in pieces for window in piece]
    # A full run counts every step, a sample the median piece: a graph captured in between does not count.
    centre = _mean if plan.full else _median
    seconds = statistics.fmean(centre(piece) for piece in pieces)
    kv_read = statistics.fmean(w.kv_nbytes for w in windows)
    on_gpu = core.cache.memory.is_cuda
    # Within a point windows differ by chance, between points by design: the spread is that of the points' means.
    slow = statistics.fmean(max(w.seconds for w in piece) for piece in pieces)
    fast = statistics.fmean(min(w.seconds for w in piece) for piece in pieces)
    peak, held = core.cache.peak, core.cache.fullest
    nbytes = {name: peak[name] for name in ("codes", "meta", "dense")}
    return _row(
        plan,
        kv,
        context,
        batch,
        status=OK,
        repeats=len(pieces[0]),
        points=len(pieces),
        steps=sum(w.steps for w in windows),
        step_ms=round(1e3 * seconds, 4),
        output_tok_s=round(batch / seconds, 2),
        output_tok_s_min=round(batch / slow, 2),
        output_tok_s_max=round(batch / fast, 2),
        decode_tok_s=round(batch / seconds, 2),
        tpot_ms=round(1e3 * seconds, 4),
        kv_bytes_total=core.cache.nbytes,
        kv_bytes_peak=sum(nbytes.values()),
        **{f"kv_bytes_{name}": value for name, value in nbytes.items()},
        effective_bits=round(8 * (held["codes"] + held["meta"] + held["dense"]) / held["elements"], 3),
        max_running=batch,
        demotions=sum(core.cache.tables.num_demotions.values()),
        preemptions=core.core.scheduler.num_preemptions,
        weight_bytes=weights.nbytes,
        kv_bytes_read=round(kv_read),
        of_roofline=round(bytes_seconds(weights, kv_read) / seconds, 4) if on_gpu else None,
        of_limit=round(limit_seconds(weights, batch, kv_read) / seconds, 4) if on_gpu else None,
    )


def _mean(piece: list[Window]) -> float:
    """Seconds of a step."""
    return sum(w.seconds * w.steps for w in piece) / sum(w.steps for w in piece)


def _median(piece: list[Window]) -> float:
    return statistics.median(w.seconds for w in piece)


def _row(plan: Plan, kv: str, context: int, batch: int, *, status: str, **values: Any) -> DecodeRow:
    return DecodeRow(
        model=plan.shape,
        kv=kv,
        batch=batch,
        input_len=context - plan.output_len,
        output_len=plan.output_len,
        context=context,
        method=FULL if plan.full else SAMPLED,
        status=status,
        **values,
    )


def _described(row: DecodeRow, started: Started, seed: int) -> DecodeRow:
    dtype = str(started.dtype).removeprefix("torch.")
    return replace(row, **provenance(device=str(started.device), dtype=dtype, threads=started.num_threads, seed=seed))


def size(plan: Plan, kv: str, config: ModelConfig, dtype: torch.dtype, kv_nbytes: int) -> Subject:
    """The requests of each context that fit in ``kv_nbytes``, and the batches to run."""
    ladder = make_ladder(resolve_kv(kv), config, dtype)
    largest = {c: min(MAX_BATCH, largest_batch(ladder, kv_nbytes, c)) for c in plan.contexts}
    batches = {c: parse_batches(plan.batches.replace("max", str(max(1, n)))) for c, n in largest.items()}
    return Subject(kv, kv_nbytes, largest, batches)


def kv_names(text: str) -> tuple[str, ...]:
    """Presets and plan files of a list, each once. Raises ``ConfigError`` for an unknown one."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        resolve_kv(name)
    return tuple(names)


def engine_config(plan: Plan, subject: Subject, batch: int) -> EngineConfig:
    """An engine for up to ``batch`` requests of the plan's longest context."""
    return EngineConfig(
        model=plan.shape,
        load_format="random",
        kv=resolve_kv(subject.kv),
        kv_memory=subject.kv_nbytes,
        prefix_caching=False,
        dtype=plan.dtype,
        device=plan.device,
        max_model_len=max(plan.contexts) if subject.largest[max(plan.contexts)] else None,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch),
        seed=plan.seed,
    )


def weight_dtype(plan: Plan, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that ``plan.dtype`` names."""
    if plan.dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    return DTYPES[plan.dtype]


def free(started: Started) -> None:
    """Gives model and KV memory back, for the next preset."""
    started.core.free()
    gc.collect()
    if started.device.type == "cuda":
        torch.cuda.empty_cache()


def largest_batch(ladder: Ladder, nbytes: int, num_tokens: int) -> int:
    """The most requests of ``num_tokens`` tokens each that an engine with ``nbytes`` of KV memory runs at once."""
    try:
        space = KVManager(planned_cache(ladder, nbytes).tables, None)
    except CapacityError:
        return 0
    params = SamplingParams(max_tokens=num_tokens)
    if space.capacity_of(params) < num_tokens:
        return 0
    number = 0
    while space.admits(request := Request(str(number), [0], params, num_tokens)):
        space.open(request)
        number += 1
    return number
