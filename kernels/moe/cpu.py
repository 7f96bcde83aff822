"""A product for each chosen expert and all of its tokens, the experts in order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import Experts, Routing, SwiGLU


def experts_mlp(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Same contract as ``qkv_engine.kernels.moe.experts_mlp``.

    The bits of a row may depend on how many tokens its experts have, as those of torch's products do.
    """
    (num_rows, size), top_k = x.shape, routing.experts.shape[1]
    gate_up, down = experts.plain(x.dtype)
    order = routing.experts.flatten().argsort(stable=True)
    counts = torch.bincount(routing.experts.flatten(), minlength=experts.num_experts).tolist()
    sorted_x = x[order // top_k]
    parts, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            part = F.linear(sorted_x[first : first + count], gate_up[expert], _of(experts.gate_up_bias, expert))
            inner = activate(part, experts.activation)
            parts.append(F.linear(inner, down[expert], _of(experts.down_bias, expert)))
            first += count
    if not parts:
        return x.new_empty(num_rows, size)
    outputs = torch.empty_like(sorted_x).index_copy(0, order, torch.cat(parts)).view(num_rows, top_k, size)
    return torch.bmm(routing.weights[:, None], outputs.float()).view(num_rows, size).to(x.dtype)


def activate(gate_up: Tensor, activation: SwiGLU) -> Tensor:
    """``activation`` of rows [N, 2 I], gate then up; returns [N, I]."""
    alpha, limit, shift = activation
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return gated * (up + shift) if shift else gated * up


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
