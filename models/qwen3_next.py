"""Qwen3-Next: Qwen3.5's layers with experts; the projections of a delta-net are in the order of its key heads."""

from __future__ import annotations

from .config import ModelConfig
from .delta_net import DeltaNet
from .fields import Fields
from .moe import read_moe, read_softmax_over
from .qwen3_5 import HybridForCausalLM, HybridLayer, HybridMoeConfig, read_hybrid
from .qwen3_moe import read_dense_layers
from .ranks import Part


def read_qwen3_next(fields: Fields) -> ModelConfig:
    """Qwen3-Next."""
    fields = fields.given(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        norm_topk_prob=True,
    )
    return read_hybrid(
        fields,
        HybridMoeConfig,
        **read_moe(fields, "moe_intermediate_size"),
        softmax_over=read_softmax_over(fields),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, 2**20, default=512),
        dense_layers=read_dense_layers(fields),
    )


class Qwen3NextDeltaNet(DeltaNet):
    """One tensor has q, k, v and the output's gate of a key head after another, and one b and a."""

    def input_pieces(self) -> list[tuple[str, Part]]:
        """See ``DeltaNet.input_pieces``."""
        spec = self.whole
        values = spec.num_v_heads // spec.num_k_heads * spec.v_dim
        return self._pieces("in_proj_qkvz", (spec.k_dim, spec.k_dim, values, values))

    def gate_pieces(self) -> list[tuple[str, Part]]:
        """See ``DeltaNet.gate_pieces``."""
        values = self.whole.num_v_heads // self.whole.num_k_heads
        return self._pieces("in_proj_ba", (values, values))

    def _pieces(self, name: str, sizes: tuple[int, ...]) -> list[tuple[str, Part]]:
        """Rows of the rank's key heads: those of the first of ``sizes`` in all heads, then of the next."""
        heads = range(self.k_heads.first, self.k_heads.first + self.k_heads.size)
        own, whole = sum(sizes), sum(sizes) * self.k_heads.whole
        return [
            (name, Part(size, head * own + sum(sizes[:i]), whole)) for i, size in enumerate(sizes) for head in heads
        ]


class Qwen3NextLayer(HybridLayer):
    """A layer with such projections."""

    delta_class = Qwen3NextDeltaNet


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Qwen3-Next."""

    layer_class = Qwen3NextLayer
