"""Weights and KV in one budget of memory: the formats that fit, best first, and the engine options of the best.

The best pair of formats fits, has the least loss, and of equals reads the fewest bytes in a decode step. Of equals in
that, too, it steps down under pressure, which serves requests beyond those that were asked for.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from qkv_engine.models.config import ModelConfig
from qkv_engine.models.loader import is_unpacked, num_parameters, resolve_dtype, weights_nbytes

from .config import WEIGHTS, EngineConfig, Fit, KVConfig
from .device.layouts import Ladder
from .device.memory import check_free, default_memory, free_memory
from .device.per_token import per_token
from .errors import CapacityError, ConfigError
from .kv.demand import Demand, Share
from .kv.slabs import make_tables
from .kv.spec import KVSpec
from .loading import check_context, find_checked, rank_ladder, resolve_device, with_weights
from .measured_loss import measured_kv_loss, measured_weights_loss
from .presets import DEFAULT_KV, PRESETS, resolve_kv
from .sizes import format_size, least_size, parse_size

logger = logging.getLogger("qkv_engine")

LADDERS = tuple(PRESETS[name] for name in (DEFAULT_KV, "bf16", "int8", "int4", "kitty-pro", "kivi-2"))

KVLoss = Callable[[KVConfig, Ladder, int], float | None]  # nats a token of a ladder's rung; None where it is unknown


@dataclass(frozen=True)
class FitTask:
    """``requests`` of ``context`` tokens at once, whose KV shares ``nbytes`` of a device, or of a rank's, with weights.

    ``dtype`` is that of activations and plain weights.
    """

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    context: int
    requests: int
    num_ranks: int = 1
    state_dtype: str | None = None

    @classmethod
    def of(
        cls, fit: Fit, model: ModelConfig, device: torch.device, config: EngineConfig, *, is_here: bool = True
    ) -> FitTask:
        """What ``fit`` asks of a model under the options of ``config``. A device that is not here needs ``fit.memory``.

        Raises ``ConfigError`` for a context that the model was not made for, ranks that cannot share it, and a share of
        memory that is not here.
        """
        check_context(model, fit.context, config.extend_context, field="context")
        model.check_ranks(config.tensor_parallel)
        if fit.memory is None:
            nbytes = default_memory(device, config.cuda_graphs)
        else:
            nbytes = parse_size(fit.memory, field="memory", free=free_memory(device) if is_here else None)
        dtype, context = resolve_dtype(config.dtype, model, device), fit.context or model.max_position_embeddings
        ranks = config.tensor_parallel
        return cls(model, dtype, device, nbytes, context, fit.requests, ranks, config.kv.state_dtype)

    @property
    def load(self) -> str:
        """The requests in words."""
        return f"{self.requests:,} request{'' if self.requests == 1 else 's'} of {self.context:,} tokens"

    def ladder(self, kv: KVConfig) -> Ladder:
        """The ladder of ``kv``. Raises ``ConfigError`` if it does not fit the model's heads."""
        kv = resolve_kv(kv, self.state_dtype)
        return rank_ladder(kv, self.model, self.num_ranks, self.dtype, self.context)


@dataclass(frozen=True)
class FitRow:
    """A format of weights, None for the checkpoint's own, beside a ladder of KV, whose blocks stand on ``rung``.

    That is the widest rung on which the requests fit, or the last one; blocks of an eager ladder always stand there.
    ``kv_bytes``: of all requests at their longest, without what slabs leave free. ``left_bytes``: of the memory,
    negative where they take more. ``step_bytes``: the most that a decode step reads then. ``limit_tok_s``:
    output tokens a second of such steps at the full bandwidth of the device's memory. Losses are in nats a token,
    ``loss`` is the sum of both. What is not known is None.
    """

    weights: str | None
    kv: str
    rung: str
    fits: bool
    weights_bytes: int
    kv_bytes: int
    left_bytes: int
    step_bytes: int
    weights_bits: float
    kv_bits: float
    weights_loss: float | None
    kv_loss: float | None
    loss: float | None
    limit_tok_s: float | None = None

    @property
    def order(self) -> tuple[bool, float, float]:
        """Ascending, the best first; bytes of a step count to two digits."""
        return not self.fits, math.inf if self.loss is None else self.loss, float(f"{self.step_bytes:.2g}")


def fit_rows(
    task: FitTask,
    ladders: Sequence[KVConfig] = LADDERS,
    kv_loss: KVLoss = measured_kv_loss,
    weights: Sequence[str | None] = (),
) -> list[FitRow]:
    """All pairs of a format of ``weights`` and a ladder that fits the model's heads, best first.

    ``weights`` are by default all that the model may have. Of equals the one whose ladder comes first is first.
    """
    sizes = {name: _weights_nbytes(task, name) for name in weights} or dict(_sizes(task))
    built = list(_built(task, ladders))
    rows = [_row(task, name, size, kv, ladder, kv_loss) for name, size in sizes.items() for kv, ladder in built]
    return sorted(rows, key=lambda row: row.order)


def _sizes(task: FitTask) -> Iterator[tuple[str | None, int]]:
    """Formats that the weights may have, with their bytes; an unpacked one takes as many as the checkpoint's own."""
    yield None, _weights_nbytes(task, None)
    for name in () if is_unpacked(task.device) else WEIGHTS:
        with suppress(ConfigError):
            yield name, _weights_nbytes(task, name)


def _weights_nbytes(task: FitTask, name: str | None) -> int:
    return weights_nbytes(with_weights(task.model, name), task.dtype, task.num_ranks, task.device)


def _built(task: FitTask, ladders: Sequence[KVConfig]) -> Iterator[tuple[KVConfig, Ladder]]:
    for kv in ladders:
        with suppress(ConfigError):
            yield kv, task.ladder(kv)


def _row(task: FitTask, name: str | None, weights: int, kv: KVConfig, ladder: Ladder, kv_loss: KVLoss) -> FitRow:
    rungs = range(ladder.last if ladder.eager else 0, ladder.last + 1)
    rung = next((rung for rung in rungs if _holds(task, ladder.spec, weights, rung)), None)
    at = ladder.last if rung is None else rung
    kv_bytes = task.requests * _request_nbytes(ladder.spec, task.context, at)
    lost, kv_lost = measured_weights_loss(name), kv_loss(kv, ladder, at)
    return FitRow(
        weights=name,
        kv=kv.name,
        rung=ladder.names[at],
        fits=rung is not None,
        weights_bytes=weights,
        kv_bytes=kv_bytes,
        left_bytes=task.nbytes - weights - kv_bytes,
        step_bytes=weights + kv_bytes,
        weights_bits=round(8 * weights * task.num_ranks / num_parameters(task.model), 3),
        kv_bits=round(per_token(ladder, at, task.context).bits, 3),
        weights_loss=lost,
        kv_loss=kv_lost,
        loss=None if lost is None or kv_lost is None else lost + kv_lost,
    )


def no_fit(task: FitTask, rows: Sequence[FitRow], ladders: Sequence[KVConfig] = LADDERS) -> CapacityError:
    """The error of a task that no row fits. It names the smallest changes with which the smallest row does."""
    least = min(rows, key=lambda row: row.step_bytes)
    ladder = task.ladder(next(kv for kv in ladders if kv.name == least.kv))

    def largest(field: str, most: int) -> int:
        """The largest value below ``most`` of a field of the task with which the smallest row fits."""
        return bisect_left(range(1, most), True, key=lambda number: not holds(**{field: number}))

    def holds(**change: Any) -> bool:
        return _holds(replace(task, **change), ladder.spec, least.weights_bytes, ladder.last)

    changes = [f"memory to at least {least_size(least.step_bytes, lambda nbytes: holds(nbytes=nbytes))}"]
    for field, most in (("requests", task.requests), ("context", task.context)):
        if number := largest(field, most):
            changes.append(f"{field} to at most {number:,}")
    return CapacityError(
        f"weights and {task.load} take {format_size(least.step_bytes)} in the smallest formats",
        field="memory",
        value=format_size(task.nbytes),
        remedy=f"Change {', or '.join(changes)}",
    )


def fitted(config: EngineConfig) -> EngineConfig:
    """``config`` with the options that its ``fit`` stands for; without one ``config`` itself.

    Raises ``CapacityError`` if nothing fits, or the memory is not free; weights are not downloaded before.
    """
    if config.fit is None:
        return config
    fit, device, found = config.fit, resolve_device(config.device), list[tuple[FitTask, FitRow]]()

    def choose(model: ModelConfig) -> None:
        task = FitTask.of(fit, model, device, config)
        check_free(task.nbytes, free_memory(device), device, field="memory", value=fit.memory)
        rows = fit_rows(task)
        if not rows[0].fits:
            raise no_fit(task, rows)
        found.append((task, rows[0]))

    find_checked(config, choose)
    task, best = found[-1]
    logger.info("fit: weights %s, KV %s, blocks on %s", best.weights or "as stored", best.kv, best.rung)
    return replace(
        config,
        weights=best.weights,
        kv=resolve_kv(best.kv, task.state_dtype),
        kv_memory=task.nbytes - best.weights_bytes,
        max_model_len=task.context,
        max_num_seqs=max(config.max_num_seqs, task.requests),
    )


def _holds(task: FitTask, spec: KVSpec, weights: int, rung: int) -> bool:
    """Whether a cache beside ``weights`` bytes runs all requests at once, by its own admission, and on ``rung``."""
    try:
        tables = make_tables(spec, task.nbytes - weights)
    except CapacityError:
        return False
    last, demand = spec.num_rungs - 1, Demand(tables)
    share = Share(last, task.context, [group.split(task.context, group.floors[last]) for group in spec.groups])
    demand.add(share, task.requests)
    wide, narrow = demand.slots(rung), demand.slots(last)
    return tables.fits(wide) and tables.fits_whatever_stepped_down(narrow, demand.floors())


def _request_nbytes(spec: KVSpec, context: int, rung: int) -> int:
    """Bytes of a request's slots and blocks, its open block whole."""
    total = 0
    for group in spec.groups:
        dense, narrow = group.split(context, group.floors[rung])
        total += dense * group.widest.nbytes + narrow * group.rungs[group.floors[rung]].nbytes
        total += sum(group.slot_sizes(rung))
    return total
