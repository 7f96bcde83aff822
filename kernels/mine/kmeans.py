"""Lloyd's k-means, many problems at once, the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_ITERATIONS = 10  # on the demo model's 1,024 tokens: K's inertia within .1 % of that of 30, V's within 1.3 %


def kmeans(x: Tensor, number: int, num_iterations: int = NUM_ITERATIONS) -> Tensor:
    """The means of ``number`` clusters, which start from evenly spaced points; empty ones keep theirs.

    Shapes:  x [P, N, D] float32;  returns [P, number, D] float32
    """
    clusters = torch.arange(number, device=x.device)
    means, member = x[:, clusters * x.shape[1] // number], x.new_empty(len(x), number, x.shape[1])
    for _ in range(num_iterations):
        half_norms = means.square().sum(-1).mul_(0.5).unsqueeze(1)
        nearest = torch.baddbmm(half_norms, x, means.mT, alpha=-1).argmin(-1)
        torch.eq(nearest.unsqueeze(1), clusters[:, None], out=member)
        counts = member.sum(-1, keepdim=True)
        means = torch.where(counts > 0, torch.bmm(member, x) / counts.clamp_(min=1), means)
    return means
