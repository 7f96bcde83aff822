"""Edits of logits before a draw, masks, bias and penalties, as one table of (row, token) entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNSEEN = -1  # count of an entry that is not penalized


class Edits(NamedTuple):
    """Entries in the order in which they are applied: fixed ones (allowed tokens and bias), penalties, bans.

    penalties [M, 4] float32: repetition, frequency, presence, and 1 for a row that has only its allowed tokens.
    rows, tokens, counts [E] int32, biases [E] float32; ``counts``: times the output has the token, or UNSEEN. ``ends``:
    the three kinds' ends. Within a kind no (row, token) occurs twice, except equal bans.
    """

    penalties: Tensor
    rows: Tensor
    tokens: Tensor
    counts: Tensor
    biases: Tensor
    ends: tuple[int, int, int]


def edit_reference(logits: Tensor, edits: Edits) -> tuple[Tensor, Tensor]:
    """See ``edit``."""
    edited = logits.float() if logits.dtype != torch.float32 else logits.clone()
    edited[edits.penalties[:, 3] != 0] = -torch.inf
    start = 0
    for end, source in zip(edits.ends, (logits, edited, edited), strict=True):
        rows, tokens, counts = (x[start:end].long() for x in (edits.rows, edits.tokens, edits.counts))
        values = source[rows, tokens].float() + edits.biases[start:end]
        if bool((counts != UNSEEN).any()):
            values = _penalize(values, counts, edits.penalties[rows])
        edited[rows, tokens] = values
        start = end
    return edited, logits.amax(dim=-1).float()


def _penalize(values: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    repetition, frequency, presence, _ = penalties.unbind(1)
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts.float() - presence * (counts > 0)
