"""Profiles from gradients: the gradient norms of W_k and W_v, and the sensitivity of K and V to each format.

A layer's score is the Frobenius norm of dLoss/dW_k, or of dLoss/dW_v; the loss is the mean cross-entropy of the next
token. The model's own modules run: one forward pass keeps the residual stream before each layer, and the backward pass
runs the layers again from the last to the first, so the activations and weight gradients of one layer at a time exist.
Source: KVmix (arXiv 2506.08018), with one backward pass a text and unshifted labels; PM-KVQ (arXiv 2505.18610).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.errors import CapacityError, ModelError
from qkv_engine.layer_kv import kv_of_layers
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.layers import Linear
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.ranks import Part
from qkv_engine.plan_file import KeyScale

from .moments import LayerSums
from .profile import LayerScores, Profile, Prompts, Sensitivities, mean
from .sensitivity import Candidates, side_sensitivities
from .sequence import Heads, SequenceBatch, layer_by_layer, run

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
    """The mean of the profiles of texts; ``candidates`` of any layer. Raises ``ModelError`` for what is not finite."""
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
    """A profile of zeros, with which settings are checked before the passes over the texts."""
    candidates = Candidates.of_layers(kv_of_layers(config), config.dtype)[0]
    nothing = [0.0] * config.num_layers
    k, v = ([nothing] * len(names) for names in candidates)
    text = TextProfile(LayerScores(nothing, nothing), k, v, nothing)
    return mean_profile([text], config, config.dtype, candidates, prompts, position_scale)


def profile_texts(
    model: LlamaForCausalLM,
    texts: Sequence[Text],
    candidates: Sequence[Candidates],
    position_scale: int = 1,
    moments: Sequence[LayerSums] = (),
) -> Iterator[TextProfile]:
    """Yields the profile of each of ``texts``; ``candidates`` of each layer, the same formats in all.

    Each text is added to the ``moments`` of each layer, if they are wanted.

    Raises ``ModelError`` for a token that the model does not have, ``CapacityError`` if the device has no memory for a
    text.
    """
    for text in texts:
        with checked(model, text):
            yield profile_text(model, text, candidates, position_scale, moments)


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


def profile_text(
    model: LlamaForCausalLM,
    text: Text,
    candidates: Sequence[Candidates],
    position_scale: int = 1,
    moments: Sequence[LayerSums] = (),
) -> TextProfile:
    """The profile of one text of at least two tokens; see ``profile_texts``."""
    ids = torch.tensor(text.token_ids, device=model.model.norm.weight.device)
    labels = ids[1:].clone()
    labels[: text.first_label - 1] = -100  # the label that cross_entropy ignores
    batch = ProfilingBatch(model.config.attention, candidates, moments)
    with layer_by_layer(model), weight_norms(model) as norms:
        hidden = run(model, ids[:-1], batch, position_scale)
        loss, gradient = _loss_gradient(model, hidden.detach(), labels)
        torch.autograd.backward(hidden, gradient)
    found = [torch.cat((norms[layer], batch.numbers[layer])) for layer in range(model.config.num_layers)]
    k, v, outliers, *rest = torch.stack(found).T.tolist()
    number = len(candidates[0].k)
    return TextProfile(LayerScores(k, v), rest[:number], rest[number:], outliers, loss)


class ProfilingBatch(SequenceBatch):
    """A ``SequenceBatch`` whose backward pass leaves the ``numbers`` of each layer's keys and values.

    The numbers are the outlier ratio of K, then the sensitivities to the candidates of K and of V: [1 + candidates]
    float32. A layer that reads the KV of an earlier one adds to the gradients there. ``moments``, one a layer or none:
    what the heads are added to.
    """

    def __init__(
        self, specs: Sequence[AttentionSpec], candidates: Sequence[Candidates], moments: Sequence[LayerSums] = ()
    ):
        super().__init__(specs)
        self.candidates, self.moments = candidates, moments
        self.numbers = dict[int, Tensor]()
        self._readers = dict[int, list[Heads]]()  # gradients of those who read a layer's KV

    def attend_heads(self, layer: int, heads: Heads, null_logits: Tensor | None) -> Tensor:
        """See ``SequenceBatch.attend_heads``."""
        see = partial(self._read if layer in self._readers else self._finish, layer)
        self._readers.setdefault(layer, [])
        watched: Callable[..., tuple[Tensor, ...]] = WatchedHeads.apply
        return super().attend_heads(layer, Heads(*watched(see, *heads)), null_logits)

    def _read(self, layer: int, _: Heads, gradient: Heads) -> None:
        self._readers[layer].append(gradient)

    def _finish(self, layer: int, heads: Heads, gradient: Heads) -> None:
        gradients = [gradient, *self._readers.pop(layer)]
        k_gradient, v_gradient = (sum(each[1:], each[0]) for each in list(zip(*gradients, strict=True))[1:])
        peaks = heads.k.abs().amax(0).float()
        ratio = peaks.max() / peaks.median().clamp(min=LEAST_MEDIAN)
        k = side_sensitivities(heads.k, k_gradient, self.candidates[layer].k)
        v = side_sensitivities(heads.v, v_gradient, self.candidates[layer].v)
        self.numbers[layer] = torch.cat((ratio[None], k, v))
        if self.moments:
            self.moments[layer].add(heads, Heads(gradient.q, k_gradient, v_gradient))


class WatchedHeads(torch.autograd.Function):
    """The heads as they are; the backward pass calls ``see`` with them and their gradients.

    They are saved as any operator saves its inputs, so of a checkpointed layer they exist in its own backward pass.
    """

    @staticmethod
    def forward(ctx: Any, see: Callable[[Heads, Heads], None], *heads: Tensor) -> tuple[Tensor, ...]:
        """Shapes of ``Heads``."""
        ctx.see = see
        ctx.save_for_backward(*heads)
        return tuple(x.view_as(x) for x in heads)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients as they are."""
        ctx.see(Heads(*ctx.saved_tensors), Heads(*gradient))
        return None, *gradient


@contextmanager
def weight_norms(model: LlamaForCausalLM) -> Iterator[dict[int, Tensor]]:
    """Within it a backward pass leaves the Frobenius norms [2] of the gradients of each layer's W_k and W_v.

    Where values are keys they have one matrix, and twice its norm. A gradient lives until its norms are known.
    """
    found = dict[int, Tensor]()
    projections = [each for each in model.modules() if isinstance(each, Linear) and "k_proj" in each.shards]

    def take(layer: int, shards: Mapping[str, Part], weight: Tensor) -> None:
        assert weight.grad is not None, "called once it is there"
        parts = dict(zip(shards, torch.split(weight.grad, [rows.size for rows in shards.values()]), strict=True))
        k = parts["k_proj"]
        found[layer] = torch.stack([part.float().norm() for part in (k, parts.get("v_proj", k))])
        weight.grad = None

    hooks = []
    try:
        for layer, each in enumerate(projections):
            weight = each.weight.requires_grad_()
            hooks.append(weight.register_post_accumulate_grad_hook(partial(take, layer, each.shards)))
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        for each in projections:
            each.weight.requires_grad_(False).grad = None


def _loss_gradient(model: LlamaForCausalLM, hidden: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The mean loss, and its gradient with respect to the hidden states [N, E] after the final norm."""
    gradient, count, total = torch.empty_like(hidden), (labels >= 0).sum(), 0.0
    for rows, targets, out in zip(*(torch.split(t, LOSS_ROWS) for t in (hidden, labels, gradient)), strict=True):
        rows = rows.detach().requires_grad_()
        loss = F.cross_entropy(model.compute_logits(rows).float(), targets, reduction="sum") / count
        out.copy_(torch.autograd.grad(loss, rows)[0])
        total += float(loss.detach())
    return total, gradient
