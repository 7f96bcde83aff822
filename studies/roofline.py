"""Roofline of one decode step: the bytes it must read, its arithmetic, and the least time on one H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qkv_engine.models.registry import MODELS

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig

BANDWIDTH = 4.3e12  # B/s of an H200's memory, measured by a copy
FLOPS = 788e12  # bf16 FLOP/s of its tensor cores, measured


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights: all of them, and those that every step reads; ``multiplied`` counts parameters.

    A step looks up a few rows of the input embedding, which does not count unless it is the output embedding too.
    """

    nbytes: int
    read_nbytes: int
    multiplied: int


def count_weights(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """The weights of ``config`` in ``dtype``, without making any."""
    with torch.device("meta"):
        model = MODELS[config.architecture](config)
    total = sum(parameter.numel() for parameter in model.parameters())
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    return Weights(total * dtype.itemsize, (total - unread) * dtype.itemsize, matrices - unread)


def bytes_seconds(weights: Weights, kv_nbytes: float) -> float:
    """Seconds of a step that only reads its weights and ``kv_nbytes`` of KV, at full bandwidth."""
    return (weights.read_nbytes + kv_nbytes) / BANDWIDTH


def limit_seconds(weights: Weights, batch: int, kv_nbytes: float) -> float:
    """``bytes_seconds``, with matrix products at their arithmetic's time where that is longer than their reading."""
    products = max(weights.read_nbytes / BANDWIDTH, 2 * weights.multiplied * batch / FLOPS)
    return products + kv_nbytes / BANDWIDTH
