"""OSCAR by its own rules: rotations fitted to what attention asks, then every token clipped and coded at 2 bits.

Keys are rotated by U H: U holds the eigenvectors of the queries' second moment, H is the Hadamard matrix that spreads
each of them over all channels. Values have the same of their own second moment, in which a token weighs as much as the
queries ask for its key: w = k^T E[q q^T] k. All channels of a token then share a step and a minimum.
Source:  OSCAR (arXiv 2605.17757), FutureMLS-Lab/OSCAR: README.md, rotation/compute_kv_rotation.py (qqt, sst, r_h_pbr),
sglang-research/python/sglang/QuantKernel/oscar_rotation_clip_int2_kv.py
Assumed:  groups are whole heads, as released for heads of 128, so the bit-reversal permutation P, which only spreads
directions over several groups, changes nothing and is left out. Step and minimum are fp16 (2.25 bits, as the paper
counts; its server's default is float32). The released levels are uniform; its later Lloyd-Max option is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import quantizers
from .cache import LayerCache, Side, Simulate, by_token
from .hadamard import element_bits, hadamard, rotated

__all__ = ["BITS", "element_bits", "key_moment", "layer", "rotation", "simulate", "value_moment"]

BITS = 2
K_CLIP, V_CLIP = 0.96, 0.92  # share of a token's channels whose magnitudes are below the one it is clipped to
SINK, RECENT = 64, 256  # tokens in full precision: the first and the newest


def key_moment(q: Tensor, num_kv_heads: int) -> Tensor:
    """E[q q^T] over tokens and the query heads of each KV head. Shapes:  q [HQ, n, D];  returns [H, D, D] float64"""
    heads = torch.unflatten(q.double(), 0, (num_kv_heads, -1)).flatten(1, 2)
    found: Tensor = heads.mT @ heads / heads.shape[1]
    return found


def value_moment(asked: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """E[w v v^T], the weights w = k^T asked k of mean 1.

    Shapes:  asked [H, D, D], of ``key_moment``;  k and v [H, n, D];  returns [H, D, D] float64
    """
    k, v = k.double(), v.double()
    weights = (k @ asked * k).sum(-1)
    weights = weights / weights.mean(-1, keepdim=True).clamp(min=1e-12)
    return (v * weights[..., None]).mT @ v / v.shape[1]


def rotation(moments: Tensor, *, by_head: bool = False) -> Tensor:
    """The rotation ``[D, D]`` of a layer's side from its moments [H, D, D], of whose mean it is, as the paper has it.

    ``by_head``: one of each head, [H, D, D], as the release has it for models that need them (its pull request 20).
    """
    vectors = torch.linalg.eigh(moments if by_head else moments.mean(0)).eigenvectors
    found: Tensor = vectors.float() @ hadamard(moments.shape[-1])
    return found


def clip(x: Tensor, share: float) -> Tensor:
    """``x`` within plus and minus the magnitude of rank ``share`` of each token. Shapes:  x [..., D]"""
    rank = min(int(share * x.shape[-1]), x.shape[-1] - 1)
    limit = x.abs().sort(-1).values[..., rank : rank + 1]
    return x.clamp(-limit, limit)


def simulate(matrix: Tensor, share: float, bits: int = BITS) -> Simulate:
    """Keys or values ``[H, n, D]``, rotated by ``matrix``, clipped, quantized and dequantized."""
    tokens = by_token(lambda groups: quantizers.kitty(clip(groups, share), bits).values(), matrix.shape[-1])
    return rotated(tokens, matrix)


def layer(k_rotation: Tensor, v_rotation: Tensor) -> LayerCache:
    """A layer's cache with the rotations of its keys and values; tokens leave the window one by one."""
    sides = ((k_rotation, K_CLIP), (v_rotation, V_CLIP))
    k, v = (Side(lambda full: max(0, full - RECENT), simulate(*side), SINK) for side in sides)
    return LayerCache(k, v)
