"""Ministral: layers with and without a window. In Ministral 3 queries grow with the position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.kernels.rope_kv_write import KeyBasis

from .attention import AttentionBatch
from .config import SLIDING, ModelConfig, read_layer_types, read_num_layers
from .fields import Fields
from .layers import HeadNorm
from .llama import LlamaForCausalLM
from .ranks import ALONE, Ranks
from .rope import Rotation, with_default_rope

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(ModelConfig):
    """``query_growth`` b: queries are multiplied by 1 + b log(1 + n), n times the trained context from the start."""

    query_growth: float


def read_ministral(fields: Fields) -> ModelConfig:
    """Ministral: windows in the layers that ``layer_types`` names, else in all."""
    fields = fields.given(num_key_value_heads=8, sliding_window=4096)
    return ModelConfig.read(fields, layer_types=read_layer_types(fields, lambda layer: True))


def read_ministral3(fields: Fields) -> ModelConfig:
    """Ministral 3."""
    fields = fields.given(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    fields = with_default_rope(fields, _ROPE)
    rope = Fields(fields.get("rope_scaling") or fields.get("rope_parameters"), "rope_parameters")
    return Ministral3Config.read(
        fields,
        layer_types=(SLIDING,) * read_num_layers(fields),
        query_growth=rope.number("llama_4_scaling_beta", 0.0, 100.0, default=0.0),
    )


class ScaledQueries:
    """An ``AttentionBatch`` that multiplies each token's queries by a factor before it attends."""

    def __init__(self, batch: AttentionBatch, num_heads: int, factors: Tensor):
        self.batch, self.num_heads, self.factors = batch, num_heads, factors

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch.attend``; without a norm, which would undo the factor."""
        assert norm is None
        qkv[:, : self.num_heads].mul_(self.factors.to(qkv.dtype))
        return self.batch.attend(layer, qkv, rotation, norm, null_logits, key_basis)


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3."""

    def __init__(self, config: Ministral3Config, ranks: Ranks = ALONE):
        super().__init__(config, ranks)
        self.growth, self.context = config.query_growth, config.ropes[0].original_max_position_embeddings

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor | None = None
    ) -> Tensor:
        """See ``LlamaForCausalLM.forward``."""
        if self.growth and self.context:
            factors = 1 + self.growth * torch.log1p(torch.floor(positions / self.context))
            batch = ScaledQueries(batch, self.ranks.part(self.config.num_heads).size, factors.view(-1, 1, 1))
        return super().forward(input_ids, positions, batch, rows)
