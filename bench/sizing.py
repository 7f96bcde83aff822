"""Requests that a KV memory holds, and bytes that requests need, by the cache's own admission."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qkv_engine.config import KVConfig
from qkv_engine.device.layouts import Ladder
from qkv_engine.device.memory import default_kv_memory, free_memory
from qkv_engine.errors import CapacityError
from qkv_engine.kv.manager import KVManager
from qkv_engine.kv.slabs import least_nbytes, make_tables
from qkv_engine.loading import rank_ladder
from qkv_engine.presets import PRESETS
from qkv_engine.request import Request, SamplingParams
from qkv_engine.sizes import MAX_SIZE, format_size, parse_size

from .batches import MAX_REQUESTS, parse_requests
from .roofline import count_weights

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig


def nbytes_for(config: ModelConfig, num_requests: int, num_tokens: int) -> int:
    """The least bytes in which ``num_requests`` of ``num_tokens`` tokens each run together at 16 bits."""
    spec = make_ladder(PRESETS["bf16"], config, torch.bfloat16).spec
    block = spec.main.widest.nbytes
    # Without slabs each request takes as many bytes.
    one = sum(sum(group.split(num_tokens, 0)) * group.widest.nbytes for group in spec.groups)
    one += sum(slot.nbytes for group in spec.groups for slot in group.slots)
    blocks = max(-(-num_requests * one // block), -(-least_nbytes(spec) // block))
    while make_tables(spec, blocks * block).max_requests(num_tokens, 0) < num_requests:
        blocks += 1
    return blocks * block


class Machine(NamedTuple):
    """A model's configuration, the dtype of its weights, and the device that holds them or a rank's part of them."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_ranks: int = 1


def kv_nbytes(machine: Machine, memory: str | None, kv_memory: str | None, num_tokens: int) -> int:
    """Bytes of a rank's KV memory that sizes on the command line mean: of weights and KV together, or of KV alone.

    ``kv_memory`` may be "8x", for requests of ``num_tokens`` tokens at 16 bits. Without both it is an engine's default.
    Raises ``ConfigError`` for a text that is no size, and ``CapacityError`` if ``memory`` does not hold the weights.
    """
    number, config = parse_requests(kv_memory), machine.config.share(machine.num_ranks)
    if number is not None:
        return nbytes_for(config, number, num_tokens)
    weights, free = count_weights(config, machine.dtype, machine.device).nbytes, free_memory(machine.device)
    if kv_memory is not None:
        return parse_size(kv_memory, field="kv_memory", free=max(1, free - weights))
    if memory is None:
        return max(1, default_kv_memory(machine.device, MAX_SIZE) - weights)
    nbytes = parse_size(memory, field="memory", free=free) - weights
    if nbytes <= 0:
        message = f"the weights alone take {format_size(weights)}"
        raise CapacityError(message, field="memory", value=memory, remedy="Raise memory, or use a smaller model")
    return nbytes


def largest_batch(ladder: Ladder, nbytes: int, num_tokens: int) -> int:
    """The most requests with KV of ``num_tokens`` tokens each that an engine with ``nbytes`` of it runs at once."""
    try:
        space = KVManager(make_tables(ladder.spec, nbytes), None)
    except CapacityError:
        return 0
    params, floor = SamplingParams(max_tokens=num_tokens), space.num_rungs - 1
    if space.capacities[floor] < num_tokens:
        return 0
    for number in range(MAX_REQUESTS):
        request = Request(str(number), [0], params, num_tokens, floor=floor)
        if not space.admits(request):
            return number
        space.open(request)
    return MAX_REQUESTS


def make_ladder(
    kv: KVConfig, config: ModelConfig, dtype: torch.dtype, num_ranks: int = 1, max_model_len: int | None = None
) -> Ladder:
    """The ladder of ``kv`` on a rank for a model of ``config`` that computes in ``dtype``.

    No request is longer than ``max_model_len``, by default the model's context.
    Raises ``ConfigError`` for one that was made for another model or does not fit this one.
    """
    if kv.model is not None:
        kv.model.check_shape(config, kv.name)
    return rank_ladder(kv, config, num_ranks, dtype, max_model_len)
