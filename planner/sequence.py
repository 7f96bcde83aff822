"""One sequence through a model's own modules, without a KV cache: attention in plain torch, so gradients pass through.

Where weights or inputs want gradients, the modules' operators leave their inputs as they are. Weights must not be
packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qkv_engine.kernels.attention_reference import softmax_weights
from qkv_engine.kernels.delta_net import DeltaWeights, gated_rms_norm
from qkv_engine.kernels.delta_net.cpu import delta_net_chunk
from qkv_engine.kernels.rms_norm.reference import rms_norm
from qkv_engine.kernels.rope_kv_write import KeyBasis
from qkv_engine.kernels.rope_kv_write.key_basis import in_basis
from qkv_engine.models.attention_spec import AttentionSpec
from qkv_engine.models.layers import HeadNorm
from qkv_engine.models.llama import LlamaForCausalLM
from qkv_engine.models.rope import Rotation


class Heads(NamedTuple):
    """Queries [N, HQ, D], keys and values [N, H, D] of one sequence as attention takes them: normed, rotated, and in
    the basis of the layer's keys if it has one.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class SequenceBatch:
    """An ``AttentionBatch`` of one whole sequence, which holds no cache. ``specs``: those of the layers with KV."""

    def __init__(self, specs: Sequence[AttentionSpec]):
        self.specs = specs

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norm: HeadNorm | None,
        null_logits: Tensor | None = None,
        key_basis: KeyBasis | None = None,
    ) -> Tensor:
        """See ``AttentionBatch.attend``; ``qkv`` stays as it is."""
        heads = split_heads(self.specs[layer], qkv, rotation, norm)
        if key_basis is not None:
            heads = Heads(in_basis(heads.q, key_basis.q), in_basis(heads.k, key_basis.k), heads.v)
        return self.attend_heads(layer, heads, null_logits)

    def delta_net(self, layer: int, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights) -> Tensor:
        """See ``StateBatch.delta_net``; states begin with zeros and are not kept."""
        recurrent = torch.zeros(weights.spec.recurrent_shape, dtype=torch.float32, device=qkv.device)
        out, _, _ = delta_net_chunk(qkv, b, a, weights, recurrent, qkv.new_zeros(weights.spec.conv_shape))
        return gated_rms_norm(out, z, weights.norm, weights.eps)

    def attend_heads(self, layer: int, heads: Heads, null_logits: Tensor | None) -> Tensor:
        """Attention of ``layer`` over the whole sequence, [N, HQ, D]; the place to look at ``heads``."""
        return attend(self.specs[layer], heads, null_logits)


def run(model: LlamaForCausalLM, input_ids: Tensor, batch: SequenceBatch, position_scale: int = 1) -> Tensor:
    """Hidden states [N, E] after the final norm, the tokens at positions 0, s, ... (N - 1) s.

    With a ``position_scale`` s above 1 short texts show keys as rotated as long ones do.
    Source: PM-KVQ (arXiv 2505.18610), positional interpolation
    """
    positions = torch.arange(len(input_ids), device=input_ids.device) * position_scale
    hidden: Tensor = model(input_ids, positions, batch)
    return hidden


@contextmanager
def layer_by_layer(model: LlamaForCausalLM) -> Iterator[None]:
    """Within it each decoder layer keeps its input alone, and runs once more in the backward pass."""
    try:
        for layer in model.model.layers:
            vars(layer)["forward"] = partial(_checkpointed, layer.forward)
        yield
    finally:
        for layer in model.model.layers:
            vars(layer).pop("forward", None)


def _checkpointed(forward: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    if isinstance(rest[0], Tensor):  # the residual: its sum with x is one tensor to keep, not two
        x, rest = x + rest[0], (None, *rest[1:])
    return checkpoint(forward, x, *rest, use_reentrant=False, preserve_rng_state=False)


def split_heads(spec: AttentionSpec, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Heads:
    """Heads of projections ``qkv`` [N, HQ + 2 H, D], after the q/k norm and the rotation."""
    num_queries, num_keys = spec.num_heads, spec.num_heads + spec.num_kv_heads
    qk, v = qkv[:, :num_keys], qkv[:, num_keys:]
    if norm is not None:
        qk = rms_norm(qk, norm.weight, norm.eps)
    wide = qk.float()
    first, second = wide.chunk(2, dim=-1)
    qk = (wide * rotation.cos + torch.cat((second, first), -1) * rotation.signed_sin).to(qkv.dtype)
    return Heads(qk[:, :num_queries], qk[:, num_queries:], v)


def attend(spec: AttentionSpec, heads: Heads, null_logits: Tensor | None = None) -> Tensor:
    """Causal attention of one sequence by ``spec``: [N, HQ, D]. With a soft cap or null logits N x N scores exist."""
    q, k, v = heads
    # As many KV heads as query heads: every back end of torch then has a flash kernel, without N x N scores.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    num_tokens, window = q.shape[2], spec.window
    if window is not None and window >= num_tokens:
        window = None
    if spec.softcap is not None or null_logits is not None:
        scores = q[0].float() @ k[0].float().mT * spec.scale
        weights = softmax_weights(scores, window=window, softcap=spec.softcap, null_logits=null_logits)
        return (weights @ v[0].float()).to(q.dtype).transpose(0, 1)
    if window is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
    else:
        seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=spec.scale)
    return out[0].transpose(0, 1)
