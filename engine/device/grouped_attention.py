"""Attention of a step whose layers are in several groups: each layer attends over the tables of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.models.attention import AttentionBatch
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.rope import Rotation

from .layouts import Ladder


class GroupedAttention:
    """The attention of each group, which counts its own layers, as that of the model's layers."""

    def __init__(self, ladder: Ladder, groups: Sequence[AttentionBatch]):
        self._places, self._groups = ladder.places, groups

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
        group, index = self._places[layer]
        return self._groups[group].attend(index, qkv, rotation, norm, null_logits, key_basis)


def over_groups(ladder: Ladder, groups: Sequence[AttentionBatch]) -> AttentionBatch:
    """One attention for the layers of all groups."""
    return groups[0] if len(groups) == 1 else GroupedAttention(ladder, groups)
