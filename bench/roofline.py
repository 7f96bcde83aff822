"""The bytes and arithmetic of one decode step, and the least time that one H200 needs for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qkv_engine.models.loader import kept_config, layers_with_weights
from qkv_engine.models.moe import MoE
from qkv_engine.models.registry import build_model

if TYPE_CHECKING:
    from qkv_engine.models.config import ModelConfig

GPU = "H200"  # the product whose figures follow; limits mean nothing for another
BANDWIDTH = 4.3e12  # B/s of its memory, measured by a copy
FLOPS = 788e12  # bf16 FLOP/s of its tensor cores, measured


class Weights(NamedTuple):
    """Bytes of a model's weights: all of them, and those that every step reads; ``multiplied`` counts parameters.

    A step looks up a few rows of the input embedding, which does not count unless it is the output embedding too.
    Of experts, with ``expert_nbytes`` in all, a token chooses the share ``chosen`` and is multiplied by it.
    """

    nbytes: int
    read_nbytes: int
    multiplied: int
    expert_nbytes: int = 0
    chosen: float = 1.0

    def nbytes_read(self, batch: int) -> float:
        """Bytes that a step of ``batch`` tokens reads; each chooses its experts evenly and for itself."""
        return self.read_nbytes + self.expert_nbytes * (1.0 - (1.0 - self.chosen) ** batch)


def count_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> Weights:
    """The weights of ``config`` in ``dtype`` as ``device`` keeps them, without making any.

    Without a device no weight is unpacked.
    """
    config = kept_config(config, device)
    model = build_model(config)
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    experts = [parameter for moe in moes for parameter in (moe.gate_up, moe.down)]
    chosen = moes[0].top_k / moes[0].num_experts if moes else 1.0
    total = sum(layer.weight_nbytes(dtype) for _, layer in layers_with_weights(model, config))
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    biases = {id(each) for moe in moes for each in (moe.gate_up_bias, moe.down_bias)}
    matrices = sum(each.numel() for each in model.parameters() if each.dim() == 2 and id(each) not in biases)
    expert_matrices = sum(each.numel() for each in experts)
    expert_nbytes = sum(moe.expert_nbytes(dtype) for moe in moes)
    return Weights(
        nbytes=total,
        read_nbytes=total - unread * dtype.itemsize - expert_nbytes,
        multiplied=matrices - unread + round(expert_matrices * chosen),
        expert_nbytes=expert_nbytes,
        chosen=chosen,
    )


def limit_seconds(weights: Weights, batch: int, kv_nbytes: float) -> float:
    """The least seconds of a step that reads its weights and ``kv_nbytes`` of KV.

    Bytes pass at full bandwidth; matrix products take their arithmetic's time where that is longer.
    """
    products = max(weights.nbytes_read(batch) / BANDWIDTH, 2 * weights.multiplied * batch / FLOPS)
    return products + kv_nbytes / BANDWIDTH
