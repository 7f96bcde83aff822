"""Granite 3: multipliers of the embedding, of what layers add, of attention's scores and of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qkv_engine.kernels.linear import Addend

from .attention import AttentionBatch
from .config import ModelConfig, read_biases, read_multiplier
from .fields import Fields
from .layers import taken
from .llama import DecoderLayer, LlamaForCausalLM
from .ranks import ALONE, Ranks
from .rope import Rotation


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """``residual_multiplier`` is that of what attention and MLP add to the residual stream."""

    residual_multiplier: float


def read_granite(fields: Fields) -> ModelConfig:
    """Granite 3, dense."""
    return GraniteConfig.read(
        fields, **read_granite_options(fields), mlp_bias=fields.boolean("mlp_bias", default=False)
    )


def read_granite_options(fields: Fields) -> dict[str, Any]:
    """The multipliers and attention's biases, as options of ``GraniteConfig.read``."""
    return {
        "scale": read_multiplier(fields, "attention_multiplier"),
        **read_biases(fields),
        "embedding_multiplier": read_multiplier(fields, "embedding_multiplier"),
        "residual_multiplier": read_multiplier(fields, "residual_multiplier"),
        "logit_multiplier": 1 / read_multiplier(fields, "logits_scaling"),
    }


class GraniteLayer(DecoderLayer):
    """Llama's layer, whose addends are multiplied."""

    def __init__(self, config: GraniteConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        self.multiplier = config.residual_multiplier

    def forward(
        self,
        x: Addend,
        residual: Tensor | None,
        rotation: Rotation,
        batch: AttentionBatch,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``DecoderLayer.forward``."""
        normed, residual = self.input_layernorm(x, residual)
        attended = self.self_attn(normed, rotation, batch, rows) * self.multiplier
        normed, residual = self.post_attention_layernorm(attended, taken(residual, rows))
        return self.feed_forward(normed) * self.multiplier, residual

    def feed_forward(self, x: Tensor) -> Tensor:
        """What the layer adds behind attention, before it is multiplied: x and result [N, E]."""
        out: Tensor = self.mlp(x)
        return out


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite 3."""

    layer_class = GraniteLayer
