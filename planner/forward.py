"""A differentiable forward pass over a model's own weights: plain torch operators, causal attention, no KV cache.

The engine's own pass writes a cache and works in place, so it has no gradients. One pass serves all architectures,
whose differences are flags of the layers. Weights must not be packed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv_engine.errors import ModelError
from qkv_engine.kernels.rms_norm.reference import rms_norm
from qkv_engine.models.attention import Attention
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.config import ModelConfig
from qkv_engine.models.layers import Norm
from qkv_engine.models.llama import DecoderLayer, LlamaForCausalLM
from qkv_engine.models.registry import FAMILIES
from qkv_engine.models.rope import Rotation


class Heads(NamedTuple):
    """Queries [N, HQ, D], keys and values [N, H, D] of one sequence as attention takes them: normed and rotated."""

    q: Tensor
    k: Tensor
    v: Tensor


class LayerPass(NamedTuple):
    """One decoder layer's pass over N tokens.

    Shapes: output [N, E], the residual stream after the layer; normed [N, E], the input of the qkv projection; qkv
    [N, (HQ + 2 H) D], its output.
    """

    output: Tensor
    normed: Tensor
    qkv: Tensor
    heads: Heads


def check_model(config: ModelConfig) -> None:
    """Raises ``ModelError`` unless this pass computes the model of ``config``: Llama's graph, all layers alike."""
    first, family = config.attention[0], FAMILIES[config.architecture]
    plain = AttentionSpec(first.num_heads, first.num_kv_heads, first.head_dim, first.head_dim**-0.5)
    if family.model is not LlamaForCausalLM or {*config.attention} != {plain} or len({*config.ropes}) > 1:
        remedy = "Use a KV preset; plans are made for Llama, Qwen2, Qwen3, Mistral without a window, and their like"
        raise ModelError("plans are not supported", field="architecture", value=config.architecture, remedy=remedy)


def decoder_layers(model: LlamaForCausalLM) -> list[DecoderLayer]:
    """The layers in order."""
    return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]


def embed(model: LlamaForCausalLM, input_ids: Tensor, position_scale: int = 1) -> tuple[Tensor, Rotation]:
    """The residual stream [N, E] before the first layer, and the rotation of positions 0, s, ... (N - 1) s.

    With a ``position_scale`` s above 1 short texts show keys as rotated as long ones do.
    Source: PM-KVQ (arXiv 2505.18610), positional interpolation
    """
    positions = torch.arange(len(input_ids), device=input_ids.device) * position_scale
    return model.model.embed_tokens(input_ids), model.model.rotary_emb(positions)[0]


def run_layer(layer: DecoderLayer, x: Tensor, rotation: Rotation) -> LayerPass:
    """``layer`` over the residual stream x [N, E] of one sequence."""
    normed = norm(layer.input_layernorm, x)
    qkv = layer.self_attn.qkv_proj(normed)
    heads = split_heads(layer.self_attn, qkv, rotation)
    x = x + layer.self_attn.o_proj(attend(heads))
    gate, up = layer.mlp.gate_up_proj(norm(layer.post_attention_layernorm, x)).chunk(2, dim=-1)
    return LayerPass(x + layer.mlp.down_proj(F.silu(gate) * up), normed, qkv, heads)


def compute_logits(model: LlamaForCausalLM, x: Tensor) -> Tensor:
    """Logits [M, V] of rows x [M, E] of the residual stream after the last layer."""
    return model.compute_logits(norm(model.model.norm, x))


def norm(module: Norm, x: Tensor) -> Tensor:
    """RMSNorm by plain operators: the kernels of ``module`` write in place."""
    return rms_norm(x, module.weight, module.eps)


def split_heads(attention: Attention, qkv: Tensor, rotation: Rotation) -> Heads:
    """Heads of the qkv projection's output [N, (HQ + 2 H) D], after the q/k norm and the rotation."""
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    each = qkv.view(len(qkv), heads + 2 * kv_heads, attention.head_dim)
    qk, v = each[:, : heads + kv_heads], each[:, heads + kv_heads :]
    if attention.qk_norm is not None:
        qk = norm(attention.qk_norm, qk)
    wide = qk.float()
    first, second = wide.chunk(2, dim=-1)
    qk = (wide * rotation.cos + torch.cat((second, first), -1) * rotation.signed_sin).to(qkv.dtype)
    return Heads(qk[:, :heads], qk[:, heads:], v)


def attend(heads: Heads) -> Tensor:
    """Causal attention of one sequence, [N, HQ D]."""
    q, k, v = heads
    # As many KV heads as query heads: every back end of torch then has a flash kernel, without N x N scores.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out[0].transpose(0, 1).reshape(out.shape[2], -1)
