"""Plain gated delta-net, token by token in float32: the definition that the other forms are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6  # added to the squared length of q and of k


def short_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The causal convolution of each channel behind its state, then SiLU.

    Shapes:  x [T, C];  state [C, W - 1], the inputs before x, the oldest first;  weight [C, W];
             returns [T, C] in the dtype of x, and the state behind it
    """
    rows = []
    for inputs in x:
        window = torch.cat((state, inputs[:, None]), dim=1)
        rows.append(F.silu((window.float() * weight.float()).sum(1)).to(x.dtype))
        state = window[:, 1:]
    return torch.stack(rows), state


def gates(b: Tensor, a: Tensor, decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The rate of writing ``sigmoid(b)``, and the log of what the state keeps, ``-decay softplus(a + dt_bias)``.

    Shapes:  b, a [T, HV];  decay, dt_bias [HV] float32;  returns beta and g, both [T, HV] float32
    """
    return b.float().sigmoid(), -decay * F.softplus(a.float() + dt_bias)


def unit(x: Tensor) -> Tensor:
    """``x`` in float32 with length 1 in the last dimension."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + NORM_EPS)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each token scales the state by exp(g), corrects what it holds under k by beta, and reads it with q / sqrt(DK).

    Shapes:  q, k [T, HK, DK], normed to length 1 here;  v [T, HV, DV];  beta, g [T, HV];  state [HV, DK, DV] float32;
             returns [T, HV, DV] in the dtype of v, and the state behind the tokens
    Source: Gated Delta Networks (arXiv 2412.06464)
    """
    group = v.shape[1] // k.shape[1]
    q, k = (unit(x).repeat_interleave(group, dim=1) for x in (q, k))
    rows = []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        held = (state * k[t][:, :, None]).sum(1)
        written = (v[t].float() - held) * beta[t][:, None]
        state = state + k[t][:, :, None] * written[:, None, :]
        rows.append((state * q[t][:, :, None]).sum(1) * k.shape[-1] ** -0.5)
    return torch.stack(rows).to(v.dtype), state


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight * silu(z)``: float32 inside, cast before the weight, like Hugging Face.

    Shapes:  x, z [N, D];  weight [D];  returns [N, D] in the dtype of x
    """
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * F.silu(z.float())).to(x.dtype)
