"""Second moments of a model's heads over texts: what queries ask, how keys and values vary, what the loss feels.

All are [H, D, D] float64, a matrix a KV head, of keys as a cache holds them: after q/k norm and rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.errors import ConfigError, ModelError
from qkv_engine.models.basis import attentions_with_bases
from qkv_engine.models.llama import LlamaForCausalLM

from .sensitivity import SINK
from .sequence import Heads


@dataclass(frozen=True)
class SideMoments:
    """Moments of K or of V of one layer, all [H, D, D] float64.

    ``metric``: the squared error that an error d of a token makes is d metric d. ``covariance``: of the tokens of a
    block around their mean. ``gradient``: the sum over a text's tokens of g g^T, g being the loss's gradient.
    """

    metric: Tensor
    covariance: Tensor
    gradient: Tensor


class LayerSums:
    """Sums over texts of one layer's moments; ``scale`` is that of its scores."""

    def __init__(self, scale: float):
        self.scale = scale
        self.queries: Tensor | None = None
        self.num_queries = self.num_free = self.num_texts = 0
        self.scatters = list[Tensor]()  # of K and of V
        self.gradients = list[Tensor]()

    def add(self, heads: Heads, gradient: Heads) -> None:
        """Adds one text. Its sink stays dense and counts for queries alone. Shapes: those of ``Heads``."""
        group = heads.q.shape[1] // heads.k.shape[1]
        queries = torch.unflatten(products(heads.q), 0, (-1, group)).sum(1)
        sides = [(scatter(x[SINK:]), products(g[SINK:])) for x, g in zip(heads[1:], gradient[1:], strict=True)]
        if self.queries is None:
            self.queries = torch.zeros_like(queries)
            self.scatters, self.gradients = ([torch.zeros_like(side[n]) for side in sides] for n in range(2))
        self.queries += queries
        for side, (within, felt) in enumerate(sides):
            self.scatters[side] += within
            self.gradients[side] += felt
        num_tokens = max(0, len(heads.k) - SINK)
        self.num_queries += len(heads.q) * group
        self.num_free += num_tokens - -(-num_tokens // BLOCK_TOKENS)
        self.num_texts += 1

    def found(self, value_metric: Tensor) -> tuple[SideMoments, SideMoments]:
        """The moments of K and of V, whose metric is given.

        Raises ``ConfigError`` if no text is longer than the sink, ``ModelError`` for numbers that are not finite.
        """
        if self.queries is None or not self.num_free:
            remedy = f"Give texts of more than {SINK + BLOCK_TOKENS} tokens"
            raise ConfigError("no token of the texts is behind the sink", field="max_tokens", remedy=remedy)
        metrics = (self.queries * (self.scale**2 / self.num_queries), value_metric.to(self.queries.device))
        sides = tuple(
            SideMoments(metric.cpu(), (within / self.num_free).cpu(), (felt / self.num_texts).cpu())
            for metric, within, felt in zip(metrics, self.scatters, self.gradients, strict=True)
        )
        if not all(bool(x.isfinite().all()) for side in sides for x in vars(side).values()):
            raise ModelError("its heads or their gradients are not finite", field="model", remedy="Check its weights")
        return sides[0], sides[1]


def products(x: Tensor) -> Tensor:
    """The sum over tokens of x x^T, a matrix a head. Shapes:  x [N, H, D];  returns [H, D, D] float64"""
    heads = x.double().transpose(0, 1)
    return heads.mT @ heads


def scatter(x: Tensor) -> Tensor:
    """The sum over tokens of (x - m) (x - m)^T, m being the mean of the token's block of 128; the last may be shorter.

    Shapes:  x [N, H, D];  returns [H, D, D] float64
    """
    blocks = torch.split(x.double(), BLOCK_TOKENS)
    return products(torch.cat([block - block.mean(0) for block in blocks]) if len(x) else x)


def moments_of(model: LlamaForCausalLM, sums: Sequence[LayerSums]) -> list[tuple[SideMoments, SideMoments]]:
    """The moments of K and of V of each layer. Raises as ``LayerSums.found``."""
    metrics = (
        value_metric(attention.o_proj.weight, attention.num_kv_heads, attention.head_dim)
        for attention in attentions_with_bases(model)
    )
    return [layer.found(metric) for layer, metric in zip(sums, metrics, strict=True)]


def value_metric(weight: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """M of each KV head, the sum of W_g^T W_g over its query heads, whose columns of the output projection W_g are.

    An error d of a value is the error p W_g d of the layer's output, p being the attention paid to it.
    Shapes:  weight [E, HQ * D];  returns [H, D, D] float64
    """
    columns = torch.unflatten(weight.double(), 1, (num_kv_heads, -1, head_dim))
    return torch.einsum("ehgc,ehgd->hcd", columns, columns)
