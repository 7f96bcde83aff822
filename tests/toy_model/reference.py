"""The same model plainly: one sequence, float32, checkpoint tensors by name, no cache and no kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.models.config import ModelConfig


def logits(tensors: dict[str, Tensor], config: ModelConfig, ids: Tensor) -> Tensor:
    """Logits [N, V] of the sequence ids [N]."""
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config.num_layers):
        names = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in tensors.items()}
        normed = norm(x, names["input_layernorm.weight"], config.norm_eps)
        q, k, v = (normed @ names[f"self_attn.{side}_proj.weight"].T for side in "qkv")
        attended = attend(rotate(q, config), rotate(k, config), heads(v, config)) @ names["self_attn.o_proj.weight"].T
        gate, up = (normed @ names[f"mlp.{side}_proj.weight"].T for side in ("gate", "up"))
        x = x + attended + (F.silu(gate) * up) @ names["mlp.down_proj.weight"].T
    return norm(x, tensors["model.norm.weight"], config.norm_eps) @ tensors["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def heads(x: Tensor, config: ModelConfig) -> Tensor:
    """[N, heads * D] -> [heads, N, D]."""
    return x.unflatten(-1, (-1, config.head_dim)).transpose(0, 1)


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """Heads of x [N, heads * D], rotated by their positions 0, 1, ..."""
    x = heads(x, config)
    frequencies = config.ropes[0].theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, [HQ, N, D] over [H, N, D] -> [N, HQ * D]."""
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)
