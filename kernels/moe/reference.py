"""Plain torch, in float64 up to each rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .experts import Experts, Routing, SoftmaxOver, SwiGLU


def route(logits: Tensor, top_k: int, over: SoftmaxOver) -> Routing:
    """Same contract as ``qkv_engine.kernels.moe.route``."""
    scores = torch.where(logits.isnan(), torch.nan, logits.float())  # devices sort NaNs by their sign
    scores, experts = scores.sort(dim=-1, descending=True, stable=True)
    weights = scores.softmax(dim=-1) if over is SoftmaxOver.ALL else scores[:, :top_k].softmax(dim=-1)
    return Routing(experts[:, :top_k].int(), weights[:, :top_k].contiguous())


def activate(gate_up: Tensor, activation: SwiGLU) -> Tensor:
    """``activation`` of rows [N, 2 I], gate then up; returns [N, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    gated = (gate * torch.sigmoid(activation.alpha * gate)).to(gate_up.dtype)
    return (gated.float() * (up + activation.shift)).to(gate_up.dtype)


def experts_mlp(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Same contract as ``qkv_engine.kernels.moe.experts_mlp``."""
    top_k, (gate_up, down) = routing.experts.shape[1], experts.plain(torch.float32)
    chosen = routing.experts.flatten()
    outputs = x.new_empty(len(chosen), x.shape[1])
    for expert in chosen.unique().tolist():
        (rows,) = torch.where(chosen == expert)
        inner = _product(x[rows // top_k], gate_up, experts.gate_up_bias, expert)
        inner = activate(inner, experts.activation)
        outputs[rows] = _product(inner, down, experts.down_bias, expert)
    weighted = outputs.view(-1, top_k, x.shape[1]).double() * routing.weights[:, :, None]
    return weighted.sum(1).to(x.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    out = x.double() @ weight[expert].double().T
    return (out if bias is None else out + bias[expert].double()).to(x.dtype)
