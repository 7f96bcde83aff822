"""The rule by which scores become weights, plainly: the common part of attention references."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_weights(
    scores: Tensor,
    *,
    positions: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    null_logits: Tensor | None = None,
) -> Tensor:
    """Causal softmax of scaled scores of the last M of n tokens, each seeing ``window`` tokens up to itself.

    Shapes:  scores and result [HQ, M, n];  positions [n] of the keys, ``None`` in order;  null_logits [HQ]
    ``softcap`` c makes s of a score c tanh(s / c). A null logit is in the sum of its head's weights, and has no value.
    """
    _, rows, total = scores.shape
    keys = torch.arange(total, device=scores.device) if positions is None else positions
    queries = torch.arange(total - rows, total, device=scores.device)[:, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if null_logits is None:
        return scores.softmax(-1)
    null = null_logits.to(scores.dtype)[:, None, None].expand(-1, rows, 1)
    return torch.cat((scores, null), -1).softmax(-1)[..., :total]
