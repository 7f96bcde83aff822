"""Self-attention: projections here; q/k norm, rotation, KV write and attention by the batch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .config import ModelConfig
from .layers import HeadNorm, Layer, Linear
from .rope import Rotation


class AttentionBatch(Protocol):
    """The KV cache's view of one step. The runner makes it; every layer calls it once."""

    def attend(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """Normalises and rotates q and k, writes k and v of the step's tokens, attends to all that each token may see.

        Shapes: qkv [N, HQ + 2 H, D], contiguous, which may be overwritten; ``norm`` takes [N, HQ + H, D];
        result [N, HQ, D]. All in the model's dtype.
        """
        ...


class Attention(Layer):
    """Grouped-query attention of one layer, with the biases and the q/k norm that ``config`` asks for."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.head_dim = layer, head_dim
        self.num_heads, self.num_kv_heads = heads, kv_heads
        shards = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.qkv_proj = Linear(config.hidden_size, shards, bias=config.attention_bias)
        self.o_proj = Linear(heads * head_dim, {"o_proj": config.hidden_size}, bias=config.attention_output_bias)
        norm_shards = {"q_norm": heads, "k_norm": kv_heads}
        self.qk_norm = HeadNorm(head_dim, config.rms_norm_eps, norm_shards) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch) -> Tensor:
        """x and result [N, E]."""
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x).view(num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        attended = batch.attend(self.layer, qkv, rotation, self.qk_norm)
        out: Tensor = self.o_proj(attended.reshape(num_tokens, self.num_heads * self.head_dim))
        return out
