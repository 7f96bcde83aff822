"""Llama 2, 3, 3.1 and 3.2; the other families share this decoder, their differences being flags of ``ModelConfig``."""

from __future__ import annotations

from torch import Tensor, nn

from qkv_engine.kernels.linear import linear_swiglu

from .attention import Attention, AttentionBatch
from .config import ModelConfig
from .layers import Embedding, Layer, Linear, RMSNorm, RowParallelLinear
from .ranks import ALONE, Part, Ranks
from .rope import RotaryEmbedding, Rotation


class MLP(Layer):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``. Each of ``ranks`` has its part of the inner features."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE):
        super().__init__()
        hidden, inner = config.hidden_size, ranks.part(config.intermediate_size)
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(inner, {"down_proj": hidden}, ranks, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x and result [N, E]."""
        out: Tensor = self.down_proj(linear_swiglu(x, self.gate_up_proj.weight, self.gate_up_proj.bias))
        return out


class DecoderLayer(Layer):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__()
        self.input_layernorm = RMSNorm("input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, ranks)
        self.post_attention_layernorm = RMSNorm("post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, ranks)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """x [N, E], the addend of ``residual`` (``None``: x is the embedding) -> the same pair for the next layer.

        The residual is added right before the norm that reads it, which is one kernel on a GPU.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(Layer):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE):
        super().__init__()
        self.embed_tokens = Embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, ranks) for layer in range(config.num_layers))
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        rotation = self.rotary_emb(positions)
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, batch)
        out: Tensor = self.norm(x, residual)[0]
        return out


class LlamaForCausalLM(Layer):
    """A decoder with its output embedding. The loader builds, fills and packs it; it holds no KV.

    Each of ``ranks`` computes all hidden states and all logits; it has a part of the output embedding where that is a
    matrix of its own with a number of rows that the ranks divide.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE):
        super().__init__()
        self.config, self.ranks = config, ranks
        self.model = LlamaModel(config, ranks)
        vocab = Part.all(config.vocab_size)
        self.splits_vocab = ranks.size > 1 and not config.tie_word_embeddings and config.vocab_size % ranks.size == 0
        if self.splits_vocab:
            vocab = ranks.part(config.vocab_size)
        self.lm_head = Linear(config.hidden_size, {"lm_head": vocab}, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states ``[N, E]`` after the final norm.

        input_ids and positions ``[N]`` int64: the step's tokens, requests one after another, and each token's position
        in its own request. ``batch`` holds the requests' keys and values.
        """
        hidden: Tensor = self.model(input_ids, positions, batch)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden ``[M, E]`` -> logits ``[M, V]``, in the model's dtype."""
        logits: Tensor = self.lm_head(hidden)
        return self.ranks.gather(logits) if self.splits_vocab else logits
