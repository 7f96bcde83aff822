"""The bytes and arithmetic of one decode step, and the least time that one H200 needs for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qkv_engine.models.registry import build_model

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig

GPU = "H200"  # the product whose figures follow; limits mean nothing for another
BANDWIDTH = 4.3e12  # B/s of its memory, measured by a copy
FLOPS = 788e12  # bf16 FLOP/s of its tensor cores, measured


class Weights(NamedTuple):
    """Bytes of a model's weights: all of them, and those that every step reads; ``multiplied`` counts parameters.

    A step looks up a few rows of the input embedding, which does not count unless it is the output embedding too.
    """

    nbytes: int
    read_nbytes: int
    multiplied: int


def count_weights(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """The weights of ``config`` in ``dtype``, without making any."""
    model = build_model(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    return Weights(total * dtype.itemsize, (total - unread) * dtype.itemsize, matrices - unread)


def limit_seconds(weights: Weights, batch: int, kv_nbytes: float) -> float:
    """The least seconds of a step that reads its weights and ``kv_nbytes`` of KV.

    Bytes pass at full bandwidth; matrix products take their arithmetic's time where that is longer.
    """
    products = max(weights.read_nbytes / BANDWIDTH, 2 * weights.multiplied * batch / FLOPS)
    return products + kv_nbytes / BANDWIDTH
