"""Gated delta-net in vectorised torch: one token of many requests at once, or many tokens of one in chunks.

Nothing here writes its arguments, so gradients pass through all of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import gates, unit
from .state import DeltaWeights

CHUNK = 64  # tokens whose writes are condensed into one product with the state


def delta_net_step(
    qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, recurrent: Tensor, conv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of each of B requests.

    Shapes:  qkv [B, C];  b, a [B, HV];  recurrent [B, HV, DK, DV] float32;  conv [B, C, W - 1];
             returns [B, HV, DV] in the dtype of qkv, and both states behind the tokens
    """
    spec = weights.spec
    window = torch.cat((conv, qkv[:, :, None]), dim=2)
    mixed = F.silu((window.float() * weights.conv.float()).sum(2)).to(qkv.dtype)
    q, k, v = spec.split(mixed)
    beta, g = gates(b, a, weights.decay, weights.dt_bias)
    group = spec.num_v_heads // spec.num_k_heads
    q, k = (unit(x).repeat_interleave(group, dim=1)[:, :, None, :] for x in (q, k))
    state = recurrent * g.exp()[:, :, None, None]
    written = (v.float()[:, :, None, :] - k @ state) * beta[:, :, None, None]
    state = state + k.mT * written
    out = (q @ state)[:, :, 0] * spec.k_dim**-0.5
    return out.to(qkv.dtype), state, window[:, :, 1:]


def delta_net_chunk(
    qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, recurrent: Tensor, conv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """T tokens of one request.

    Shapes:  qkv [T, C];  b, a [T, HV];  recurrent [HV, DK, DV] float32;  conv [C, W - 1];
             returns [T, HV, DV] in the dtype of qkv, and both states behind the tokens
    """
    mixed, conv = short_conv(qkv, conv, weights.conv)
    beta, g = gates(b, a, weights.decay, weights.dt_bias)
    out, recurrent = delta_rule(*weights.spec.split(mixed), beta, g, recurrent)
    return out, recurrent, conv


def short_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as ``reference.short_conv``."""
    num_tokens, width = len(x), weight.shape[1]
    window = torch.cat((state.T, x))
    wide, factors = window.float(), weight.float()
    total = wide[:num_tokens] * factors[:, 0]
    for i in range(1, width):
        total = total + wide[i : i + num_tokens] * factors[:, i]
    return F.silu(total).to(x.dtype), window[num_tokens:].T


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as ``reference.delta_rule``; the tokens of a chunk solve one triangular system.

    With G the sum of g in a chunk up to a token and D = exp(G_i - G_j), where i is no earlier than j, the chunk writes
    ``V' = (I + lower(beta K K' D))^-1 (beta V - beta exp(G) K S)`` under its keys and reads
    ``exp(G) Q S + lower(Q K' D) V'``.
    """
    num_tokens, group = len(v), v.shape[1] // k.shape[1]
    q, k = (_chunks(unit(x).repeat_interleave(group, dim=1)) for x in (q, k))
    values, beta, total = _chunks(v.float()), _chunks(beta[:, :, None]), _chunks(g[:, :, None]).cumsum(2)
    q, chunk = q * k.shape[-1] ** -0.5, k.shape[2]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    decay = (total - total.mT).masked_fill(later, -torch.inf).exp()  # [HV, M, L, L]
    system = (beta * k) @ k.mT * decay
    rest = torch.cat((beta * values, beta * total.exp() * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    written, forgotten = solved.split((values.shape[-1], k.shape[-1]), dim=-1)
    scores, last = q @ k.mT * decay, total[:, :, -1:]
    q, k, kept = q * total.exp(), k * (last - total).exp(), last.exp()
    rows = []
    for i in range(k.shape[1]):
        new = written[:, i] - forgotten[:, i] @ state
        rows.append(q[:, i] @ state + scores[:, i] @ new)
        state = state * kept[:, i] + k[:, i].mT @ new
    out = torch.stack(rows, dim=1).flatten(1, 2)[:, :num_tokens]
    return out.transpose(0, 1).to(v.dtype), state


def _chunks(x: Tensor) -> Tensor:
    """Tokens [T, H, D] as chunks [H, M, L, D], the last one filled with zeros, which leave the state as it is."""
    length = min(CHUNK, len(x))
    padded = F.pad(x.transpose(0, 1), (0, 0, 0, -len(x) % length))
    return padded.unflatten(1, (-1, length))
