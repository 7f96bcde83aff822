"""An ``AttentionBatch`` that keeps every key and value of one request: the tests' oracle."""

from __future__ import annotations

import torch
from torch import Tensor


class DenseBatch:
    """Causal grouped-query attention over one sequence, which grows by any number of tokens a step."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat((self.keys[layer], k)) if layer in self.keys else k.clone()
        v = torch.cat((self.values[layer], v)) if layer in self.values else v.clone()
        self.keys[layer], self.values[layer] = k, v
        new, total = q.shape[0], k.shape[0]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[-1] ** -0.5
        future = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
