"""Bases of K and V folded into a model, which then caches coordinates: its scores and outputs stay the same.

The matrices of V go into weights, the inverse into those of the output projection. Those of K cannot, since the
rotation lies between weights and keys: attention multiplies keys, and queries by the inverse, once they are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from qkv_engine.errors import ConfigError
from qkv_engine.kernels.rope_kv_write import KeyBasis

from .attention import Attention
from .bases import LayerBases
from .llama import LlamaForCausalLM
from .weights.plain import PLAIN


def fold_bases(net: nn.Module, bases: Sequence[LayerBases]) -> None:
    """Has an unpacked ``net`` cache K and V in ``bases``, those of each layer for the KV heads of all ranks.

    Raises ``ConfigError`` for a model whose values pass through anything but projections, and for one whose
    projections are codes.
    """
    attentions = attentions_with_bases(net)
    if any(not isinstance(weight, Tensor) for attention in attentions for weight in _weights(attention)):
        raise _codes()
    with torch.no_grad():
        for attention, layer in zip(attentions, bases, strict=True):
            first, size = attention.kv_heads.first, attention.kv_heads.size
            weight = attention.qkv_proj.weight
            own = [each[first : first + size].to(weight.device) for each in layer]
            k, v = (each.double() for each in own[:2])
            attention.variances = (own[2], own[3])
            matrices = (k, torch.linalg.inv(k).mT)
            attention.key_basis = KeyBasis(*(each.to(weight.dtype).contiguous() for each in matrices))
            _fold_values(attention, v)


def calibrated_variances(net: nn.Module) -> list[tuple[Tensor, Tensor]] | None:
    """Variances of the channels of K and V that ``net`` caches, by layer, [H, D] float32 each; None without bases."""
    found = [module.variances for module in net.modules() if isinstance(module, Attention)]
    return [each for each in found if each is not None] or None


def check_bases(net: nn.Module) -> None:
    """Raises ``ConfigError`` if bases cannot be folded into a model like ``net``, which has no weights yet."""
    attentions = attentions_with_bases(net)
    if any(each.format is not PLAIN for attention in attentions for each in (attention.qkv_proj, attention.o_proj)):
        raise _codes()


def attentions_with_bases(net: nn.Module) -> list[Attention]:
    """The attention of each layer of ``net``. Raises ``ConfigError`` for others than projections around a batch's."""
    layers = cast(LlamaForCausalLM, net).model.layers
    found = [module for module in net.modules() if isinstance(module, Attention)]
    if len(found) != len(layers) or any(type(each).mix is not Attention.mix for each in found):
        message = "K and V of this model cannot be stored in other bases: its attention is not projections alone"
        raise ConfigError(message, field="kv", remedy="Make a plan of another method")
    return found


def _fold_values(attention: Attention, matrices: Tensor) -> None:
    """Folds one layer's matrices of V [H, D, D], float64, into its weights, head by head."""
    num_kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
    for rows in (attention.qkv_proj.weight, attention.qkv_proj.bias):
        if rows is not None:
            values = rows.view(-1, head_dim, rows.numel() // len(rows))[-num_kv_heads:]
            for value, matrix in zip(values, matrices, strict=True):
                value.copy_(matrix @ value.double())
    weight = attention.o_proj.weight
    heads = weight.view(len(weight), num_kv_heads, -1, head_dim).unbind(1)
    for columns, inverse in zip(heads, torch.linalg.inv(matrices), strict=True):
        columns.copy_(columns.double() @ inverse)


def _weights(attention: Attention) -> tuple[object, object]:
    return attention.qkv_proj.weight, attention.o_proj.weight


def _codes() -> ConfigError:
    message = "K and V cannot be stored in other bases: weights of attention that are codes take no basis in"
    return ConfigError(message, field="kv", remedy="Use plain weights, or a plan of another method")
