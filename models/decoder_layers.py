"""Decoder layers that place their norms otherwise than Llama's."""

from __future__ import annotations

from torch import Tensor

from .attention import Attention, AttentionBatch
from .config import ModelConfig
from .layers import Layer, add, taken
from .llama import MLP, make_norm
from .ranks import ALONE, Ranks
from .rope import Rotation


class PostNormLayer(Layer):
    """x + norm(attention(x)), then the same with the MLP: the norms follow."""

    attention_class: type[Attention] = Attention

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        self.self_attn = self.attention_class(config, layer, ranks)
        self.post_attention_layernorm = make_norm(config, "post_attention_layernorm")
        self.mlp = MLP(config, ranks)
        self.post_feedforward_layernorm = make_norm(config, "post_feedforward_layernorm")

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [N, E], the sum that the layer before leaves for ``residual`` -> the same for the next, of ``rows`` [M]."""
        residual = x if residual is None else add(residual, x)
        attended = self.post_attention_layernorm(self.self_attn(residual, rotation, batch, rows), None)[0]
        residual = add(taken(residual, rows), attended)
        return self.post_feedforward_layernorm(self.mlp(residual), None)[0], residual


class SandwichLayer(Layer):
    """x + norm(attention(norm(x))), then the same with the MLP: a norm before and a norm after."""

    # Names of the norms' weights in the checkpoint: before and after attention, before and after the MLP.
    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        self.input_layernorm = make_norm(config, before_attention)
        self.self_attn = Attention(config, layer, ranks)
        self.post_attention_layernorm = make_norm(config, after_attention)
        self.pre_feedforward_layernorm = make_norm(config, before_mlp)
        self.mlp = MLP(config, ranks)
        self.post_feedforward_layernorm = make_norm(config, after_mlp)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [N, E], the sum that the layer before leaves for ``residual`` -> the same for the next, of ``rows`` [M]."""
        x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotation, batch, rows), None)[0]
        x, residual = self.pre_feedforward_layernorm(x, taken(residual, rows))
        return self.post_feedforward_layernorm(self.mlp(x), None)[0], residual
