"""OLMo 2 and OLMo 3: norms after attention and MLP, and one over all heads of q and of k; OLMo 3 has windows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .attention import Attention, AttentionBatch
from .config import FULL, SLIDING, ModelConfig, read_biases, read_full_every
from .decoder_layers import PostNormLayer
from .fields import Fields
from .layers import CheckpointRows, Norm, kept
from .llama import LlamaForCausalLM
from .ranks import ALONE, Part, Ranks
from .rope import Rotation, read_ropes


def read_olmo2(fields: Fields) -> ModelConfig:
    """OLMo 2, whose attention may have biases."""
    fields = fields.given(rms_norm_eps=1e-5)
    return ModelConfig.read(fields, **read_biases(fields))


def read_olmo3(fields: Fields) -> ModelConfig:
    """OLMo 3: three of four layers have a window, the others the scaled rotation."""
    fields = fields.given(rms_norm_eps=1e-5, sliding_window=4096, rope_theta=500_000.0)
    kinds = read_full_every(fields, 4)
    ropes = read_ropes(fields, dict.fromkeys((FULL, SLIDING), fields.get("rope_theta")))
    return ModelConfig.read(
        fields,
        layer_types=kinds,
        ropes=[ropes[kind] for kind in kinds],
        **read_biases(fields),
    )


class ProjectionNorm(Norm):
    """RMSNorm over all heads of q together, and over all heads of k, before they are split."""

    def __init__(self, heads: Part, kv_heads: Part, head_dim: int, eps: float, ranks: Ranks):
        super().__init__("", (heads.size + kv_heads.size) * head_dim, eps)
        self.shards = {"q_norm": heads.times(head_dim), "k_norm": kv_heads.times(head_dim)}
        self.heads, self.ranks = [heads.size, kv_heads.size], ranks

    def forward(self, qk: Tensor) -> Tensor:
        """qk and result [N, HQ + H, D]; the mean square is that of all ranks' heads."""
        q, k = torch.split(qk.float(), self.heads, dim=1)
        means = torch.stack([x.square().mean((1, 2), keepdim=True) for x in (q, k)])
        scale_q, scale_k = (self.ranks.sum(means) / self.ranks.size).add_(self.eps).rsqrt_()  # all parts are equal
        weight = self.weight.view(-1, qk.shape[-1])
        return torch.cat((q * scale_q, k * scale_k), dim=1).mul_(weight).to(qk.dtype)

    def checkpoint_rows(self) -> Iterator[CheckpointRows]:
        start = 0
        for name, rows in self.shards.items():
            yield CheckpointRows(f"{name}.weight", (rows.whole,), self.weight, start, start + rows.size, rows.first)
            start += rows.size


class OlmoAttention(Attention):
    """Attention with a norm over all heads of q, and over all heads of k."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        heads, kv_heads = (ranks.part(count) for count in (config.num_heads, config.num_kv_heads))
        self.projection_norm = ProjectionNorm(heads, kv_heads, config.head_dim, config.norm_eps, ranks)

    def attend(self, qkv: Tensor, rotation: Rotation, batch: AttentionBatch) -> Tensor:
        """See ``Attention.attend``."""
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        qk.copy_(self.projection_norm(kept(qk)))
        return batch.attend(self.layer, qkv, rotation, None, key_basis=self.key_basis)


class OlmoLayer(PostNormLayer):
    """OLMo's layer."""

    attention_class = OlmoAttention


class OlmoForCausalLM(LlamaForCausalLM):
    """OLMo 2 and 3."""

    layer_class = OlmoLayer
