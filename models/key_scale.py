"""The key scale: keys divided and queries multiplied channel by channel, folded into weights; scores stay the same.

Both channels of a rotary pair share a factor, so it commutes with the rotation. Source: PM-KVQ (arXiv 2505.18610).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.linear import Float8Weight

from .attention import Attention


def fold_key_scale(net: nn.Module, scale: Sequence[Sequence[Sequence[float]]]) -> None:
    """Divides the keys of an unpacked ``net`` by ``scale``, and multiplies the matching queries.

    The factors go into the weights of the q/k norm, which has a row a head, or else into the rows and biases of the
    projections. Shapes:  scale [layers, H, D / 2], for the KV heads of all ranks. Raises ``ConfigError`` for others,
    and for a model whose keys are normed otherwise.
    """
    attentions = scalable_attentions(net)
    kv_heads = attentions[0].kv_heads
    shape = [len(attentions), kv_heads.whole, attentions[0].head_dim // 2]
    try:
        divisors = torch.tensor(scale, dtype=torch.float32)
    except (TypeError, ValueError) as error:  # a ragged list
        raise _refusal("not numbers in even rows", shape) from error
    if list(divisors.shape) != shape:
        raise _refusal(f"has shape {list(divisors.shape)}", shape)
    if not bool((divisors.isfinite() & (divisors > 0)).all()):
        raise _refusal("has divisors that are not positive", shape)
    with torch.no_grad():
        for attention, divisor in zip(attentions, divisors[:, kv_heads.first :][:, : kv_heads.size], strict=True):
            _fold(attention, divisor)


def scalable_attentions(net: nn.Module) -> list[Attention]:
    """The attention of each layer of ``net``. Raises ``ConfigError`` where keys are normed otherwise than there."""
    attentions = [module for module in net.modules() if isinstance(module, Attention)]
    if not attentions or any(type(attention) is not Attention for attention in attentions):
        raise ConfigError("keys of this model cannot be scaled", field="key_scale", remedy="Make a plan without it")
    return attentions


def _fold(attention: Attention, divisor: Tensor) -> None:
    """Folds one layer's divisors into its weights. Shapes:  divisor [H, D / 2]"""
    weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    if not isinstance(weight, Tensor):  # codes times scales of their rows
        if isinstance(weight, Float8Weight) and weight.is_blockwise:
            message = "keys cannot be scaled, rows of a block of the weight share a scale"
            raise ConfigError(message, field="key_scale", remedy="Make a plan without it")
        weight = weight.scales
    channels = divisor.repeat(1, 2).to(weight.device)
    queries = channels.repeat_interleave(attention.num_heads // attention.num_kv_heads, dim=0)
    factors = torch.cat((queries, 1 / channels))
    if attention.qk_norm is not None:
        attention.qk_norm.weight.mul_(factors)
        return
    for rows in (weight, bias):
        if rows is not None:
            heads = rows.view(-1, attention.head_dim, *rows.shape[1:])[: len(factors)]
            heads.mul_(factors.view(*factors.shape, *(1 for _ in rows.shape[1:])))


def _refusal(why: str, shape: list[int]) -> ConfigError:
    remedy = f"Give {shape[0]} layers of {shape[1]} KV heads of {shape[2]} pairs"
    return ConfigError(why, field="key_scale", remedy=remedy)
