"""What a KV memory of so many bytes holds, and how many bytes so many requests need: asked of the cache itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qkv_engine.config import PRESETS, KVConfig
from qkv_engine.kv.cache import KVCache
from qkv_engine.kv.ladder import Ladder, build_ladder

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig


def planned_cache(ladder: Ladder, nbytes: int) -> KVCache:
    """A cache with books but no memory. Raises ``CapacityError`` if ``nbytes`` do not hold a block."""
    return KVCache(ladder, nbytes, torch.device("meta"))


def nbytes_for(config: ModelConfig, num_requests: int, num_tokens: int) -> int:
    """The least bytes in which ``num_requests`` of ``num_tokens`` tokens each run together at 16 bits."""
    ladder = make_ladder(PRESETS["bf16"], config, torch.bfloat16)
    block = ladder.widest.block_nbytes
    blocks = num_requests * planned_cache(ladder, block).tables.blocks_for(num_tokens)
    while planned_cache(ladder, blocks * block).tables.max_requests(num_tokens, 0) < num_requests:
        blocks += 1
    return blocks * block


def make_ladder(kv: KVConfig, config: ModelConfig, dtype: torch.dtype) -> Ladder:
    """The ladder of ``kv`` for a model of ``config`` that computes in ``dtype``.

    Raises ``ConfigError`` for one that was made for another model or does not fit this one.
    """
    if kv.model is not None:
        kv.model.check_shape(config, kv.name)
    return build_ladder(
        kv,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
