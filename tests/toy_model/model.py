"""The graph: one norm a layer, and one addition to the residual stream for attention and MLP together."""

from __future__ import annotations

from torch import Tensor

from qkv_engine.models.attention import Attention, AttentionBatch
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.layers import Layer, taken
from qkv_engine.models.llama import MLP, LlamaForCausalLM, make_norm
from qkv_engine.models.ranks import Ranks
from qkv_engine.models.rope import Rotation


class ParallelLayer(Layer):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks):
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


class ParallelForCausalLM(LlamaForCausalLM):
    """Llama's embedding, final norm and output embedding around parallel layers."""

    layer_class = ParallelLayer
