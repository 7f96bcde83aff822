"""Weights and KV in one budget of memory: the formats that fit, best first, and the engine options of the best.

The best pair of formats fits, has the least loss, and of equals reads the fewest bytes in a decode step.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from qkv_engine.models.config import ModelConfig
from qkv_engine.models.loader import find_model, is_unpacked, resolve_dtype, weights_nbytes
from qkv_engine.models.weights.scheme import UNQUANTIZED

from .config import WEIGHTS, EngineConfig, Fit, KVConfig
from .device.layouts import Ladder
from .device.memory import default_memory, free_memory
from .errors import CapacityError, ConfigError
from .kv.demand import Demand, Share
from .kv.slabs import make_tables
from .kv.spec import KVSpec
from .loading import check_context, demo_folder, rank_ladder, resolve_device, with_weights
from .measured_loss import measured_kv_loss, measured_weights_loss
from .presets import DEFAULT_KV, PRESETS
from .sizes import format_least, format_size, parse_size
from .startup import most_nbytes

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

    @property
    def weights(self) -> tuple[str | None, ...]:
        """Formats that the weights may have: the checkpoint's own, None, and those that a plain one may load as."""
        if self.model.weights != UNQUANTIZED or is_unpacked(self.device):
            return (None,)
        return (None, *WEIGHTS)


@dataclass(frozen=True)
class FitChoice:
    """A format of weights beside a ladder of KV, whose blocks stand on ``rung`` as far as they may.

    It is the widest rung on which the requests fit, or the last one; blocks of an eager ladder always stand there.
    ``kv_nbytes``: of all requests at their longest, without what slabs leave free. Losses are in nats a token.
    """

    weights: str | None
    kv: KVConfig
    ladder: Ladder
    rung: int
    fits: bool
    weights_nbytes: int
    kv_nbytes: int
    weights_loss: float | None
    kv_loss: float | None

    @property
    def nbytes(self) -> int:
        """Bytes of weights and KV, which a decode step at that length reads but for experts that no token chose."""
        return self.weights_nbytes + self.kv_nbytes

    @property
    def loss(self) -> float | None:
        """The sum of both losses; None where one is unknown."""
        return None if self.weights_loss is None or self.kv_loss is None else self.weights_loss + self.kv_loss

    @property
    def order(self) -> tuple[bool, float, int]:
        """Ascending, the best first."""
        return not self.fits, math.inf if self.loss is None else self.loss, self.nbytes


def fit_task(
    fit: Fit,
    model: ModelConfig,
    device: torch.device,
    *,
    dtype: str = "auto",
    extend_context: bool = False,
    num_ranks: int = 1,
    graphs: bool = True,
) -> FitTask:
    """What ``fit`` asks of a model on a device. Raises ``ConfigError`` for a context beyond the model's."""
    check_context(model, fit.context, extend_context)
    if fit.memory is None:
        nbytes = default_memory(device, graphs)
    else:
        nbytes = parse_size(fit.memory, field="memory", free=free_memory(device) if is_here(device) else 1)
    context = fit.context or model.max_position_embeddings
    weight_dtype = resolve_dtype(dtype, model, device)
    return FitTask(model, weight_dtype, device, nbytes, context, fit.requests, num_ranks)


def fit_choices(
    task: FitTask, ladders: Sequence[KVConfig] = LADDERS, kv_loss: KVLoss = measured_kv_loss
) -> list[FitChoice]:
    """All pairs of a format of weights and one of ``ladders``, best first; of equals the ladder that comes first.

    Ladders that do not fit the model's heads are left out.
    """
    built = [(kv, ladder) for kv in ladders if (ladder := _ladder(task, kv)) is not None]
    found = []
    for weights in task.weights:
        nbytes = weights_nbytes(with_weights(task.model, weights), task.dtype, task.num_ranks, task.device)
        for kv, ladder in built:
            first = ladder.last if ladder.eager else 0
            fitting = (rung for rung in range(first, ladder.last + 1) if _holds(task, ladder.spec, nbytes, rung))
            rung = next(fitting, None)
            at = ladder.last if rung is None else rung
            found.append(
                FitChoice(
                    weights,
                    kv,
                    ladder,
                    at,
                    fits=rung is not None,
                    weights_nbytes=nbytes,
                    kv_nbytes=task.requests * _request_nbytes(ladder.spec, task.context, at),
                    weights_loss=measured_weights_loss(weights),
                    kv_loss=kv_loss(kv, ladder, at),
                )
            )
    return sorted(found, key=lambda choice: choice.order)


def best_choice(task: FitTask) -> FitChoice:
    """The best pair. Raises ``CapacityError``, as ``no_fit`` words it, if none fits."""
    choices = fit_choices(task)
    if not choices[0].fits:
        raise no_fit(task, choices)
    return choices[0]


def no_fit(task: FitTask, choices: Sequence[FitChoice]) -> CapacityError:
    """The error of a task that no choice fits. It names the smallest changes with which the smallest choice does."""
    least = min(choices, key=lambda choice: choice.nbytes)
    spec, last, weights = least.ladder.spec, least.ladder.last, least.weights_nbytes

    def holds(task: FitTask) -> bool:
        return _holds(task, spec, weights, last)

    high = 2 * least.nbytes
    while not holds(replace(task, nbytes=high)):
        high *= 2
    step = -(-high // 4096)
    nbytes = step * bisect_left(range(4096), True, key=lambda number: holds(replace(task, nbytes=number * step)))
    requests = bisect_left(range(1, task.requests), True, key=lambda number: not holds(replace(task, requests=number)))
    context = bisect_left(range(1, task.context), True, key=lambda number: not holds(replace(task, context=number)))
    changes = [f"memory to at least {format_least(nbytes).replace(' ', '')}"]
    changes += [f"requests to at most {requests:,}"] if requests else []
    changes += [f"context to at most {context:,}"] if context > 1 else []
    number = "a request" if task.requests == 1 else f"{task.requests:,} requests"
    return CapacityError(
        f"weights and {number} of {task.context:,} tokens take {format_size(least.nbytes)} in the smallest formats",
        field="memory",
        value=format_size(task.nbytes),
        remedy=f"Change {', or '.join(changes)}",
    )


def fitted(config: EngineConfig) -> EngineConfig:
    """``config`` with the options that its ``fit`` stands for; without one ``config`` itself.

    Raises ``ConfigError`` for an option that ``fit`` chooses, and ``CapacityError`` if nothing fits; weights are not
    downloaded before.
    """
    if config.fit is None:
        return config
    _refuse_chosen(config)
    fit, device, found = config.fit, resolve_device(config.device), list[tuple[FitTask, FitChoice]]()

    def choose(model: ModelConfig) -> None:
        task = fit_task(
            fit,
            model,
            device,
            dtype=config.dtype,
            extend_context=config.extend_context,
            num_ranks=config.tensor_parallel,
            graphs=config.cuda_graphs,
        )
        found.append((task, best_choice(task)))

    name = str(demo_folder()) if config.source is None else config.source
    find_model(name, load_format=config.load_format, revision=config.revision, token=config.token, check=choose)
    task, best = found[-1]
    logger.info(
        "fit: weights %s, KV %s, blocks on %s", best.weights or "as stored", best.kv.name, best.ladder.names[best.rung]
    )
    num_seqs = max(config.max_num_seqs, task.requests)
    most = most_nbytes(best.ladder, num_seqs, task.context, config.max_num_batched_tokens)
    return replace(
        config,
        fit=None,
        weights=best.weights,
        kv=best.kv,
        kv_memory=min(most, task.nbytes - best.weights_nbytes),
        max_model_len=task.context,
        max_num_seqs=num_seqs,
    )


def _refuse_chosen(config: EngineConfig) -> None:
    """Raises ``ConfigError`` for an option that ``fit`` chooses, unless it is left at its default."""
    given = {
        "kv": None if config.kv == PRESETS[DEFAULT_KV] else config.kv.name,
        "weights": config.weights,
        "kv_memory": config.kv_memory,
        "max_model_len": config.max_model_len,
    }
    for field, value in given.items():
        if value is not None:
            remedy = "Leave one of them out; a Fit has a context and memory of its own"
            raise ConfigError("fit chooses it", field=field, value=value, remedy=remedy)


def _ladder(task: FitTask, kv: KVConfig) -> Ladder | None:
    try:
        return rank_ladder(kv, task.model, task.num_ranks, task.dtype, task.context)
    except ConfigError:
        return None


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
        total += sum(slot.nbytes for slot in group.slots)
    return total


def is_here(device: torch.device) -> bool:
    """Whether this machine has such a device; one that it lacks can be planned for."""
    return device.type == "cpu" or torch.cuda.is_available()
