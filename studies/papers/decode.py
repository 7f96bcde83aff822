"""Greedy decoding of one sequence through simulated caches, with the engine's weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.kernels.rope_kv_write.key_basis import in_basis
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.rope import Rotation

from .cache import LayerCache


class SimulatedLayer(Protocol):
    """What a batch asks of a layer's simulated cache."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``LayerCache.attend``."""
        ...


@dataclass(frozen=True)
class SimulatedBatch:
    """One sequence whose layers' keys and values are in simulated caches; an ``AttentionBatch``."""

    layers: Sequence[SimulatedLayer]
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
        num_heads = qkv.shape[1] - 2 * self.num_kv_heads
        qk, v = qkv.tensor_split((num_heads + self.num_kv_heads,), 1)
        qk = qk if norm is None else norm(qk)
        qk = qk * rotation.cos + qk.roll(qk.shape[-1] // 2, -1) * rotation.signed_sin
        q, k = qk.tensor_split((num_heads,), 1)
        if key_basis is not None:
            q, k = in_basis(q, key_basis.q), in_basis(k, key_basis.k)
        out = self.layers[layer].attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        return out.transpose(0, 1)


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
