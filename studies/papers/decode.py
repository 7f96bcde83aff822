"""Sequences through simulated caches, with the engine's weights: greedy decoding, and replies that are given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.kernels.rope_kv_write.key_basis import in_basis
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.rope import Rotation

from .cache import LayerCache, attention


class Attends(Protocol):
    """A layer's cache, simulated or not."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``LayerCache``."""


@dataclass(frozen=True)
class SimulatedBatch:
    """One sequence whose layers' keys and values are in simulated caches; an ``AttentionBatch``."""

    layers: Sequence[Attends]
    num_kv_heads: int

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch``."""
        q, k, v = _heads(qkv, self.num_kv_heads, rotation, norm, key_basis)
        out = self.layers[layer].attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        return out.transpose(0, 1)


@dataclass(frozen=True)
class SimulatedLanes:
    """One token of each of several sequences, whose layers' caches are ``lanes``; an ``AttentionBatch``."""

    lanes: Sequence[Sequence[Attends]]
    num_kv_heads: int

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch``."""
        heads = (x.contiguous()[:, :, None] for x in _heads(qkv, self.num_kv_heads, rotation, norm, key_basis))
        tokens = zip(self.lanes, *heads, strict=True)
        return torch.stack([layers[layer].attend(q, k, v)[:, 0] for layers, q, k, v in tokens])


def _heads(
    qkv: Tensor, num_kv_heads: int, rotation: Rotation, norm: HeadNorm | None, key_basis: KeyBasis | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as attention takes them, after norm, rotation and basis, each ``[N, heads, D]``."""
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk, v = qkv.tensor_split((num_heads + num_kv_heads,), 1)
    qk = qk if norm is None else norm(qk)
    qk = qk * rotation.cos + qk.roll(qk.shape[-1] // 2, -1) * rotation.signed_sin
    q, k = qk.tensor_split((num_heads,), 1)
    if key_basis is not None:
        q, k = in_basis(q, key_basis.q), in_basis(k, key_basis.k)
    return q, k, v


class Seen:
    """Queries, keys and values of one layer of a text's first tokens, attended in full precision."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``LayerCache``."""
        self.q, self.k, self.v = q, k, v
        return attention(q, k, v)


class Prompt(NamedTuple):
    """A prompt that was attended in full precision: K and V of all layers ``[L, H, n, D]`` fp16, and the next token.

    Every simulated cache begins with it, so it is computed once for all of them.
    """

    k: Tensor
    v: Tensor
    next_id: int

    def fill(self, layers: Sequence[LayerCache]) -> None:
        """Puts the prompt into empty caches, which give up what their rules say."""
        for cache, k, v in zip(layers, self.k, self.v, strict=True):
            cache.k.append(k)
            cache.v.append(v)
            cache.settle()


def seen(model: LlamaForCausalLM, ids: Sequence[int]) -> tuple[list[Seen], Tensor]:
    """What each layer sees of the text ``ids``, and the last hidden states ``[1, hidden]``."""
    layers = [Seen() for _ in range(model.config.num_layers)]
    batch = SimulatedBatch(layers, model.config.num_kv_heads)
    return layers, model(torch.tensor(ids), torch.arange(len(ids)), batch)[-1:]


@torch.inference_mode()
def read(model: LlamaForCausalLM, ids: Sequence[int]) -> Prompt:
    """The prompt ``ids``, attended in full precision."""
    layers, hidden = seen(model, ids)
    k, v = (torch.stack([getattr(layer, side) for layer in layers]).half() for side in "kv")
    return Prompt(k, v, int(model.compute_logits(hidden).argmax()))


@torch.inference_mode()
def follow(
    model: LlamaForCausalLM, layers: Sequence[LayerCache], prompt: Prompt, reply: Sequence[int], piece: int
) -> Iterator[Tensor]:
    """Log-probabilities ``[n, vocabulary]`` of the tokens after the reply's first, of ``piece`` tokens at a time.

    Caches give up tokens between pieces, so a token attends at most ``piece`` - 1 more in full precision than when it
    is generated.
    """
    prompt.fill(layers)
    batch, first = SimulatedBatch(layers, model.config.num_kv_heads), prompt.k.shape[2]
    for start, end in pairwise([*range(0, len(reply) - 1, piece), len(reply) - 1]):
        hidden = model(torch.tensor(reply[start:end]), torch.arange(first + start, first + end), batch)
        yield torch.log_softmax(model.compute_logits(hidden).float(), -1)


@torch.inference_mode()
def generate_all(
    model: LlamaForCausalLM,
    lanes: Sequence[Sequence[LayerCache]],
    prompts: Sequence[Prompt],
    max_tokens: Sequence[int],
    stop_ids: Collection[int],
) -> list[list[int]]:
    """What ``generate`` gives of each prompt with its own caches, all sequences a step at a time."""
    for layers, prompt in zip(lanes, prompts, strict=True):
        prompt.fill(layers)
    outputs: list[list[int]] = [[] for _ in prompts]
    running = {number: prompt.next_id for number, prompt in enumerate(prompts) if prompt.next_id not in stop_ids}
    while True:
        for number, token in running.items():
            outputs[number].append(token)
        running = {number: token for number, token in running.items() if len(outputs[number]) < max_tokens[number]}
        if not running:
            return outputs
        batch = SimulatedLanes([lanes[number] for number in running], model.config.num_kv_heads)
        positions = [prompts[number].k.shape[2] + len(outputs[number]) - 1 for number in running]
        hidden = model(torch.tensor(list(running.values())), torch.tensor(positions), batch)
        found = model.compute_logits(hidden).argmax(-1).tolist()
        running = {number: token for number, token in zip(running, found, strict=True) if token not in stop_ids}


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, layers: list[LayerCache], prompt: list[int], max_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """The most likely tokens after ``prompt``, up to ``max_tokens`` or one of ``stop_ids``, which is left out."""
    batch = SimulatedBatch(layers, model.config.num_kv_heads)
    output: list[int] = []
    ids, positions = torch.tensor(prompt), torch.arange(len(prompt))
    while True:
        hidden = model(ids, positions, batch)
        token = int(model.compute_logits(hidden[-1:]).argmax())
        if token in stop_ids:
            return output
        output.append(token)
        if len(output) == max_tokens:
            return output
        ids, positions = torch.tensor([token]), positions[-1:] + 1
