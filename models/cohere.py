"""Cohere 2: attention and MLP in parallel behind a LayerNorm; layers with a window rotate, the others do not."""

from __future__ import annotations

from torch import Tensor

from .attention import Attention, AttentionBatch
from .config import SLIDING, ModelConfig, read_biases, read_full_every, read_multiplier, read_window_pattern
from .fields import Fields
from .layers import Layer, taken
from .llama import MLP, LlamaForCausalLM, make_norm
from .ranks import ALONE, Ranks
from .rope import NO_ROTATION, RopeConfig, Rotation


def read_cohere2(fields: Fields) -> ModelConfig:
    """Cohere 2: three of four layers have a window, and rotate in pairs of neighbours."""
    fields = fields.given(sliding_window=4096, tie_word_embeddings=True, logit_scale=0.0625, layer_norm_eps=1e-5)
    kinds = read_full_every(fields, read_window_pattern(fields, default=4))
    rope, has_window = RopeConfig.from_hf(fields, is_interleaved=True), fields.get("sliding_window") is not None
    return ModelConfig.read(
        fields,
        layer_types=kinds,
        ropes=[rope if kind == SLIDING and has_window else NO_ROTATION for kind in kinds],
        norm_eps=fields.number("layer_norm_eps", 0.0, 1.0),
        layer_norm=True,
        **read_biases(fields),
        logit_multiplier=read_multiplier(fields, "logit_scale"),
    )


class CohereLayer(Layer):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        self.input_layernorm = make_norm(config, "input_layernorm")
        self.self_attn = Attention(config, layer, ranks)
        self.mlp = MLP(config, ranks)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, batch: AttentionBatch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [N, E], the sum that the layer before leaves for ``residual`` -> the same for the next, of ``rows`` [M]."""
        x, residual = self.input_layernorm(x, residual)
        attended = self.self_attn(x, rotation, batch, rows)
        return attended + self.mlp(taken(x, rows)), taken(residual, rows)


class Cohere2ForCausalLM(LlamaForCausalLM):
    """Cohere 2: Command R7B, Command A."""

    layer_class = CohereLayer
