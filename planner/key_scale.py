"""The key scale of a model: divisors of K, one a layer, KV head and rotary pair, that make its channels more alike.

A divisor is the pair's largest magnitude to the power alpha. Each layer's alpha is the one that leaves its attention
block's output least wrong when K and V have 4 bits a token. Source: PM-KVQ (arXiv 2505.18610)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.kernels.formats import PageShape, Side, make_format
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.key_scale import scalable_attentions
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.plan_file import LEAST_SCALE, MOST_SCALE, KeyScale

from .gradients import Text, checked
from .sensitivity import pages, round_trip
from .sequence import Heads, SequenceBatch, run

ALPHAS = tuple(1 - n / 20 for n in range(21))  # exponents to try; 0 leaves a layer as it is
FORMAT = "int4-token-128"  # stores K and V during the search
SEARCH_TEXTS, SEARCH_TOKENS = 8, 512  # at most, in the search: each text costs 21 passes of attention a layer


@torch.no_grad()
def key_peaks(model: LlamaForCausalLM, text: Text, position_scale: int = 1) -> Tensor:
    """The largest magnitude of each rotary pair of K in one text: [layers, H, D / 2] float32.

    Raises as ``checked``, and ``ConfigError`` for a model whose keys cannot be scaled.
    """
    scalable_attentions(model)
    batch = _Peaks(model.config.attention)
    with checked(model, text):
        run(model, _ids(model, text.token_ids), batch, position_scale)
    return torch.stack(batch.found)


@torch.no_grad()
def output_errors(model: LlamaForCausalLM, text: Text, peaks: Tensor, position_scale: int = 1) -> Tensor:
    """Mean squared errors of each attention block's output for each of ``ALPHAS``, in one text: [layers, alphas].

    The input of each block is exact. Shapes:  peaks [layers, H, D / 2]. Raises as ``key_peaks``.
    """
    batch = _Errors(model, peaks)
    with checked(model, text):
        run(model, _ids(model, text.token_ids[:SEARCH_TOKENS]), batch, position_scale)
    return torch.stack(batch.found)


class _Peaks(SequenceBatch):
    """Leaves each layer's ``key_peaks``, in order."""

    def __init__(self, specs: Sequence[AttentionSpec]):
        super().__init__(specs)
        self.found: list[Tensor] = []

    def attend_heads(self, layer: int, heads: Heads, null_logits: Tensor | None) -> Tensor:
        """See ``SequenceBatch.attend_heads``."""
        first, second = heads.k.abs().amax(0).float().chunk(2, -1)
        self.found.append(first.maximum(second))
        return super().attend_heads(layer, heads, null_logits)


class _Errors(SequenceBatch):
    """Leaves each layer's ``output_errors``, in order. Shapes:  peaks [layers, H, D / 2]"""

    def __init__(self, model: LlamaForCausalLM, peaks: Tensor):
        super().__init__(model.config.attention)
        self.attentions, self.peaks, self.side = scalable_attentions(model), peaks, _side(model)
        self.found: list[Tensor] = []

    def attend_heads(self, layer: int, heads: Heads, null_logits: Tensor | None) -> Tensor:
        """See ``SequenceBatch.attend_heads``."""
        o_proj, rough, errors = self.attentions[layer].o_proj, heads._replace(v=_rounded(heads.v, self.side)), []
        attended = super().attend_heads(layer, heads, null_logits)
        exact = o_proj(attended.flatten(1)).float()
        for alpha in ALPHAS:
            channels = divisors(self.peaks[layer], alpha).repeat(1, 2)
            k = (_rounded(heads.k / channels, self.side) * channels).to(heads.k.dtype)
            output = o_proj(super().attend_heads(layer, rough._replace(k=k), null_logits).flatten(1))
            errors.append((output.float() - exact).square().mean())
        self.found.append(torch.stack(errors))
        return attended


def best_key_scale(peaks: Tensor, errors: Tensor) -> KeyScale:
    """The divisors of least error for each layer; of two equal errors the larger alpha's.

    Shapes:  peaks [layers, H, D / 2];  errors [layers, alphas]
    """
    best = [ALPHAS[index] for index in errors.argmin(1).tolist()]
    scale = torch.stack([divisors(pairs, alpha) for pairs, alpha in zip(peaks, best, strict=True)])
    return tuple(tuple(tuple(float(f"{d:.6g}") for d in row) for row in layer) for layer in scale.tolist())


def divisors(peaks: Tensor, alpha: float) -> Tensor:
    """peaks^alpha within the bounds of divisors."""
    return peaks.pow(alpha).clamp(LEAST_SCALE, MOST_SCALE)


def _rounded(x: Tensor, side: Side) -> Tensor:
    """Tokens [N, H, D] after a round trip through ``side``, which stores them token by token."""
    return round_trip(pages(x), side).transpose(1, 2).flatten(0, 1)[: len(x)].to(x.dtype)


def _side(model: LlamaForCausalLM) -> Side:
    shape = PageShape(model.config.num_kv_heads, BLOCK_TOKENS, model.config.head_dim)
    return make_format(FORMAT, torch.float32).layout(shape, "k")


def _ids(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, device=model.model.norm.weight.device)
