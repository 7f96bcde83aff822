"""Llama 2, 3, 3.1 and 3.2; the decoder the other families share, their differences being flags of
``ModelConfig``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, AttentionBatch
from .config import ModelConfig
from .layers import Embedding, Layer, Linear, RMSNorm
from .rope import RotaryEmbedding


class MLP(Layer):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias)
        self.down_proj = Linear(inner, {"down_proj": hidden}, bias=config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual and result [N, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate).mul_(up), residual)
        return out


class DecoderLayer(Layer):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm("input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm("post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, signed_sin: Tensor, batch: AttentionBatch) -> Tensor:
        hidden = self.self_attn(self.input_layernorm(hidden), hidden, cos, signed_sin, batch)
        out: Tensor = self.mlp(self.post_attention_layernorm(hidden), hidden)
        return out


class LlamaModel(Layer):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = Embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        cos, signed_sin = self.rotary_emb(positions)
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, signed_sin, batch)
        out: Tensor = self.norm(hidden)
        return out


class LlamaForCausalLM(Layer):
    """A decoder with its output embedding. The loader builds, fills and packs it; it holds no KV."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states ``[N, E]`` after the final norm.

        input_ids and positions ``[N]`` int64: the step's tokens, requests one after another, and where each
        stands in its own request. ``batch`` holds the requests' keys and values.
        """
        hidden: Tensor = self.model(input_ids, positions, batch)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden ``[M, E]`` -> logits ``[M, V]``, in the model's dtype."""
        logits: Tensor = self.lm_head(hidden)
        return logits
