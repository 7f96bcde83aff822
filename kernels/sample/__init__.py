"""Sampling: logits and settings -> token ids. Masks, bias and penalties come first, by ``edit``."""

from __future__ import annotations

from torch import Tensor

from .edits import UNSEEN, Edits, edit_reference
from .reference import ALL_MASKED, NOT_FINITE, OK, sample_reference
from .settings import Settings, pack_settings, uniform


def sample(logits: Tensor, settings: Settings | None = None, raw_peak: Tensor | None = None) -> Tensor:
    """One token a row, the likeliest or one drawn by ``settings``.

    A token's weight is 2^40 x 2^score, rounded down. min_p, top_k and top_p raise the row's floor, in this order. Of
    the tokens at or above it the first is drawn whose cumulative weight exceeds a number in [0, 1) of their total. Of
    equal logits the lowest id is the likeliest, and at a boundary all are kept. A row's result depends on the row
    alone, and is the same on every device.

    Shapes:  logits [M, V] bf16, fp16 or fp32, unchanged;  raw_peak [M] float32, maxima before edits, if there were any
    Returns: [2, M] int64: token ids, always below V, and faults: OK, NOT_FINITE (NaN, +inf, or nothing but -inf in
             the raw row), ALL_MASKED (edits left nothing)
    Source:  top_p arXiv 1904.09751, min_p arXiv 2407.01082; SplitMix64 for the number
    """
    if logits.is_cuda:
        from .triton import sample_triton

        return sample_triton(logits, settings, raw_peak)
    return sample_reference(logits, settings, raw_peak)


def edit(logits: Tensor, edits: Edits) -> tuple[Tensor, Tensor]:
    """Logits with the edits applied, and the row maxima of the raw ones.

    A fixed entry adds its bias to the raw logit; a later one to the edited logit. If the token was seen, the sum is
    divided by repetition (multiplied where it is <= 0), then frequency * count is subtracted, and presence if the count
    is not 0. A ban is a bias of -inf.

    Shapes:  logits [M, V] bf16, fp16 or fp32, unchanged;  returns [M, V] float32, [M] float32
    """
    if logits.is_cuda:
        from .triton import edit_triton

        return edit_triton(logits, edits)
    return edit_reference(logits, edits)


__all__ = [
    "ALL_MASKED",
    "NOT_FINITE",
    "OK",
    "UNSEEN",
    "Edits",
    "Settings",
    "edit",
    "edit_reference",
    "pack_settings",
    "sample",
    "sample_reference",
    "uniform",
]
