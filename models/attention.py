"""Self-attention without its memory: projections, norm and rotation here, keys and values in the batch's KV
cache.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .config import ModelConfig
from .layers import HeadNorm, Layer, Linear
from .rope import apply_rope


class AttentionBatch(Protocol):
    """The KV cache's view of one step. The runner makes it; every layer calls it once."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step's tokens, then attend to everything each token may see.

        Shapes: q [N, HQ, D]; k, v [N, H, D], after q/k norm and rotation; result [N, HQ, D]. All in the
        model's dtype. q, k and v are views whose rows need not be adjacent: only the last dimension is
        contiguous.
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

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, signed_sin: Tensor, batch: AttentionBatch) -> Tensor:
        """x, residual and result [N, E]; cos and signed_sin [N, 1, D] float32."""
        num_tokens = x.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).view(num_tokens, num_rotated + self.num_kv_heads, self.head_dim)
        # q and k are normalised and rotated as one tensor: half as many operators.
        qk, v = qkv.split_with_sizes((num_rotated, self.num_kv_heads), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = apply_rope(qk, cos, signed_sin)
        q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        attended = batch.attend(self.layer, q, k, v)
        out: Tensor = self.o_proj(attended.reshape(num_tokens, self.num_heads * self.head_dim), residual)
        return out
