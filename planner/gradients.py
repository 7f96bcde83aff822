"""Profiles from gradients: the gradient norms of W_k and W_v, and the sensitivity of K and V to each format.

A layer's score is the Frobenius norm of dLoss/dW_k, or of dLoss/dW_v; the loss is the mean cross-entropy of the next
token. One forward pass keeps the residual stream before each layer; the backward pass runs the layers again from the
last to the first, so the activations and weight gradients of one layer at a time exist.
Source: KVmix (arXiv 2506.08018), with one backward pass a text and unshifted labels; PM-KVQ (arXiv 2505.18610).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.errors import CapacityError, ModelError
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.llama import DecoderLayer, LlamaForCausalLM
from qkv_engine.plan_file import KeyScale

from .forward import Heads, check_model, compute_logits, decoder_layers, embed, run_layer
from .profile import LayerScores, Profile, Prompts, Sensitivities, mean
from .sensitivity import Candidates, side_sensitivities

LOSS_ROWS = 256  # rows whose logits and their gradients exist at once: 0.6 GiB for a vocabulary of 150,000
LEAST_MEDIAN = 1e-6  # least median of the channels' peak keys: keeps the ratio finite where most keys are 0


class Text(NamedTuple):
    """Token ids of one text; the loss counts the tokens from position ``first_label``, at least 1, on."""

    token_ids: list[int]
    first_label: int = 1


class TextProfile(NamedTuple):
    """One text's gradient norms of W_k and W_v, sensitivities to each candidate, and outliers of K, one a layer."""

    scores: LayerScores
    k: list[list[float]]  # one list for each candidate
    v: list[list[float]]
    key_outliers: list[float]
    loss: float = 0.0  # mean of the tokens that count, nats


def mean_profile(
    found: Sequence[TextProfile],
    config: ModelConfig,
    dtype: torch.dtype,
    candidates: Candidates,
    prompts: Prompts,
    position_scale: int = 1,
    key_scale: KeyScale | None = None,
) -> Profile:
    """The mean of the profiles of texts. Raises ``ModelError`` if anything is not finite."""
    k, v = (
        {name: mean([getattr(text, side)[index] for text in found]) for index, name in enumerate(names)}
        for side, names in (("k", candidates.k), ("v", candidates.v))
    )
    return Profile(
        dtype=str(dtype).removeprefix("torch."),
        context=config.max_position_embeddings,
        position_scale=position_scale,
        prompts=prompts,
        key_scale=key_scale,
        scores=LayerScores(mean([text.scores.k for text in found]), mean([text.scores.v for text in found])),
        sensitivities=Sensitivities(k, v),
        key_outliers=mean([text.key_outliers for text in found]),
        has_qk_norm=config.qk_norm,
        loss=mean([[text.loss] for text in found])[0],
    )


def empty_profile(config: ModelConfig, prompts: Prompts, position_scale: int = 1) -> Profile:
    """A profile of zeros, with which settings are checked before the passes over the texts.

    Raises ``ModelError`` for a model that the passes do not compute.
    """
    check_model(config)
    candidates = Candidates.of(config.num_kv_heads, config.head_dim, config.dtype)
    nothing = [0.0] * config.num_layers
    k, v = ([nothing] * len(names) for names in candidates)
    text = TextProfile(LayerScores(nothing, nothing), k, v, nothing)
    return mean_profile([text], config, config.dtype, candidates, prompts, position_scale)


def profile_texts(
    model: LlamaForCausalLM, texts: Sequence[Text], candidates: Candidates, position_scale: int = 1
) -> Iterator[TextProfile]:
    """Yields the profile of each of ``texts``.

    Raises ``ModelError`` for a token that the model does not have, ``CapacityError`` if the device has no memory for a
    text.
    """
    for text in texts:
        with checked(model, text):
            yield profile_text(model, text, candidates, position_scale)


@contextmanager
def checked(model: LlamaForCausalLM, text: Text) -> Iterator[None]:
    """Guards a pass over ``text``: ``ModelError`` for a token that ``model`` lacks, ``CapacityError`` for no memory."""
    vocab_size = model.config.vocab_size
    if max(text.token_ids) >= vocab_size:
        message = f"its tokenizer has tokens beyond the {vocab_size:,} of its embedding"
        raise ModelError(message, field="model", remedy="Use the tokenizer that belongs to the weights")
    try:
        yield
    except torch.OutOfMemoryError as error:
        message, remedy = f"no memory for a pass over {len(text.token_ids):,} tokens", "Lower max_tokens"
        raise CapacityError(message, field="max_tokens", remedy=remedy) from error


def profile_text(model: LlamaForCausalLM, text: Text, candidates: Candidates, position_scale: int = 1) -> TextProfile:
    """The profile of one text of at least two tokens."""
    device, layers = model.model.norm.weight.device, decoder_layers(model)
    ids = torch.tensor(text.token_ids, device=device)
    labels = ids[1:].clone()
    labels[: text.first_label - 1] = -100  # the label that cross_entropy ignores
    inputs = list[Tensor]()
    with torch.no_grad():
        x, rotation = embed(model, ids[:-1], position_scale)
        for layer in layers:
            inputs.append(x)
            x = run_layer(layer, x, rotation).output
    loss, gradient = _loss_gradient(model, x, labels)
    found = list[Tensor]()
    for layer in reversed(layers):
        x = inputs.pop().requires_grad_()
        passed = run_layer(layer, x, rotation)
        wanted = (x, passed.qkv, passed.heads.k, passed.heads.v)
        gradient, *inner = torch.autograd.grad(passed.output, wanted, gradient)
        with torch.no_grad():
            norms = _weight_norms(layer, passed.normed, inner[0])
            found.append(torch.cat((norms, _head_numbers(passed.heads, inner[1], inner[2], candidates))))
        del passed, x, wanted, inner
    k, v, outliers, *rest = torch.stack(found[::-1]).T.tolist()
    number = len(candidates.k)
    return TextProfile(LayerScores(k, v), rest[:number], rest[number:], outliers, loss)


def _loss_gradient(model: LlamaForCausalLM, x: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The mean loss, and its gradient with respect to the residual stream x [N, E] after the last layer."""
    gradient, count, total = torch.empty_like(x), (labels >= 0).sum(), 0.0
    for rows, targets, out in zip(*(torch.split(t, LOSS_ROWS) for t in (x, labels, gradient)), strict=True):
        rows = rows.detach().requires_grad_()
        loss = F.cross_entropy(compute_logits(model, rows).float(), targets, reduction="sum") / count
        out.copy_(torch.autograd.grad(loss, rows)[0])
        total += float(loss.detach())
    return total, gradient


def _weight_norms(layer: DecoderLayer, normed: Tensor, qkv_gradient: Tensor) -> Tensor:
    """Frobenius norms [2] of the gradients of W_k and W_v, the rows of the fused weight that belong to each."""
    shards = [rows.size for rows in layer.self_attn.qkv_proj.shards.values()]
    _, k, v = ((part.T @ normed).float().norm() for part in torch.split(qkv_gradient, shards, dim=1))
    return torch.stack((k, v))


def _head_numbers(heads: Heads, k_gradient: Tensor, v_gradient: Tensor, candidates: Candidates) -> Tensor:
    """The outlier ratio of K, then the sensitivities to the candidates of K and of V: [1 + candidates] float32."""
    peaks = heads.k.abs().amax(0).float()
    ratio = peaks.max() / peaks.median().clamp(min=LEAST_MEDIAN)
    k = side_sensitivities(heads.k, k_gradient, candidates.k)
    v = side_sensitivities(heads.v, v_gradient, candidates.v)
    return torch.cat((ratio[None], k, v))
