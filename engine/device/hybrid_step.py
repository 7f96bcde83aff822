"""A step of a model some of whose layers have a state in place of KV."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from qkv_engine.kernels.delta_net import DeltaWeights
from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation


class States(Protocol):
    """The states of a step's requests."""

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        """See ``StateBatch.delta_net``."""
        ...


class HybridStep:
    """The attention of a step and its states, as a ``StateBatch``."""

    def __init__(self, attention: AttentionBatch, states: States):
        self._attention, self._states = attention, states

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch``."""
        return self._attention.attend(layer, qkv, rotation, norm, null_logits, key_basis)

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        """See ``StateBatch``."""
        return self._states.delta_net(layer, qkv, z, b, a, weights)
