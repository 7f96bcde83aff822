"""Hunyuan, dense: heads of q and k are normed after the rotation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.kernels.rope_kv_write.cpu import rotate

from .attention import Attention, AttentionBatch
from .config import ModelConfig, read_biases, read_head_dim
from .fields import Fields
from .layers import HeadNorm, kept
from .llama import DecoderLayer, LlamaForCausalLM
from .ranks import ALONE, Ranks
from .rope import RopeConfig, Rotation


def read_hunyuan(fields: Fields) -> ModelConfig:
    """Hunyuan, dense, whose attention may have biases."""
    fields = fields.given(rms_norm_eps=1e-5)
    return ModelConfig.read(fields, rope=_read_rope(fields), **read_biases(fields))


def _read_rope(fields: Fields) -> RopeConfig:
    """The rotation. Type ``dynamic`` with an ``alpha`` stands for a larger base, whatever the context."""
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = Fields(fields.get(source) or {}, source)
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    if not is_dynamic or rope.get("alpha") is None:
        return RopeConfig.from_hf(fields)
    home, head_dim = fields if rope.get("rope_theta") is None else rope, read_head_dim(fields)
    theta = home.number("rope_theta", 2.0, 1e15, default=10_000.0)
    alpha = rope.number("alpha", 1.0, 1e9)
    return RopeConfig(theta=theta * alpha ** (head_dim / (head_dim - 2)) if head_dim > 2 else theta)


class HunyuanAttention(Attention):
    """Attention whose norm over heads of q and k comes after their rotation."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks = ALONE):
        super().__init__(config, layer, ranks)
        shards = {"query_layernorm": self.num_heads, "key_layernorm": self.num_kv_heads}
        self.head_norm = HeadNorm(self.head_dim, config.norm_eps, shards)

    def attend(self, qkv: Tensor, rotation: Rotation, batch: AttentionBatch) -> Tensor:
        """See ``Attention.attend``. The batch is left nothing to rotate."""
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        rotate(qk, *rotation, out=qk)
        qk.copy_(F.rms_norm(kept(qk), (self.head_dim,), None, self.head_norm.eps) * self.head_norm.weight)
        at_rest = Rotation(torch.ones_like(rotation.cos), torch.zeros_like(rotation.signed_sin))
        return batch.attend(self.layer, qkv, at_rest, None, key_basis=self.key_basis)


class HunyuanLayer(DecoderLayer):
    """Hunyuan's layer."""

    attention_class = HunyuanAttention


class HunyuanForCausalLM(LlamaForCausalLM):
    """Hunyuan, dense."""

    layer_class = HunyuanLayer
