"""Gradient norms of the key and value projections, layer by layer: KVmix's measure of what each layer can bear.

A layer's score is the Frobenius norm of dLoss/dW_k, or of dLoss/dW_v, averaged over texts; the loss is the mean
cross-entropy of the next token. One forward pass keeps the residual stream before each layer; the backward pass runs
the layers again from the last to the first, so the activations and weight gradients of one layer at a time exist.
Source: KVmix (arXiv 2506.08018), with one backward pass a text and unshifted labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.errors import CapacityError, ModelError
from qkv_engine.models.llama import DecoderLayer, LlamaForCausalLM

from .forward import compute_logits, embed, run_layer
from .kvmix import LayerScores

LOSS_ROWS = 256  # rows whose logits and their gradients exist at once: 0.6 GiB for a vocabulary of 150,000


class Text(NamedTuple):
    """Token ids of one text; the loss counts the tokens from position ``first_label``, at least 1, on."""

    token_ids: list[int]
    first_label: int = 1


def mean_scores(scores: Sequence[LayerScores]) -> LayerScores:
    """The mean over texts, to six digits. Raises ``ModelError`` if any is not finite."""
    k, v = (
        [float(f"{fmean(layer):.6g}") for layer in zip(*side, strict=True)]
        for side in ((found.k for found in scores), (found.v for found in scores))
    )
    if not all(map(math.isfinite, (*k, *v))):
        raise ModelError("its loss or its gradients are not finite", field="model", remedy="Check its weights")
    return LayerScores(k, v)


def score_texts(model: LlamaForCausalLM, texts: Sequence[Text]) -> Iterator[LayerScores]:
    """Yields the scores of each of ``texts``.

    Raises ``ModelError`` for a token that the model does not have, ``CapacityError`` if the device has no memory for a
    text.
    """
    vocab_size = model.config.vocab_size
    for text in texts:
        if max(text.token_ids) >= vocab_size:
            message = f"its tokenizer has tokens beyond the {vocab_size:,} of its embedding"
            raise ModelError(message, field="model", remedy="Use the tokenizer that belongs to the weights")
        try:
            yield score_text(model, text)
        except torch.OutOfMemoryError as error:
            message, remedy = f"no memory for the gradients of {len(text.token_ids):,} tokens", "Lower max_tokens"
            raise CapacityError(message, field="max_tokens", remedy=remedy) from error


def score_text(model: LlamaForCausalLM, text: Text) -> LayerScores:
    """The gradient norms of one text of at least two tokens."""
    device = model.model.norm.weight.device
    ids = torch.tensor(text.token_ids, device=device)
    labels = ids[1:].clone()
    labels[: text.first_label - 1] = -100  # what cross_entropy ignores
    inputs = list[Tensor]()
    with torch.no_grad():
        x, rotation = embed(model, ids[:-1])
        for layer in _layers(model):
            inputs.append(x)
            x = run_layer(layer, x, rotation).output
    gradient = _loss_gradient(model, x, labels)
    norms = list[Tensor]()
    for layer in reversed(_layers(model)):
        x = inputs.pop().requires_grad_()
        passed = run_layer(layer, x, rotation)
        gradient, qkv_gradient = torch.autograd.grad(passed.output, (x, passed.qkv), gradient)
        norms.append(_weight_norms(layer, passed.normed.detach(), qkv_gradient))
        del passed, x
    k, v = torch.stack(norms[::-1]).T.tolist()
    return LayerScores(k, v)


def _layers(model: LlamaForCausalLM) -> list[DecoderLayer]:
    return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]


def _loss_gradient(model: LlamaForCausalLM, x: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean loss with respect to the residual stream x [N, E] after the last layer."""
    gradient, count = torch.empty_like(x), (labels >= 0).sum()
    for rows, targets, out in zip(*(torch.split(t, LOSS_ROWS) for t in (x, labels, gradient)), strict=True):
        rows = rows.detach().requires_grad_()
        loss = F.cross_entropy(compute_logits(model, rows).float(), targets, reduction="sum") / count
        out.copy_(torch.autograd.grad(loss, rows)[0])
    return gradient


def _weight_norms(layer: DecoderLayer, normed: Tensor, qkv_gradient: Tensor) -> Tensor:
    """Frobenius norms [2] of the gradients of W_k and W_v, the rows of the fused weight that belong to each."""
    shards = list(layer.self_attn.qkv_proj.shards.values())
    _, k, v = ((part.T @ normed).float().norm() for part in torch.split(qkv_gradient, shards, dim=1))
    return torch.stack((k, v))
