"""What attention computes in one layer: heads, scale, window, soft cap and null logit."""

from __future__ import annotations

from typing import NamedTuple


class AttentionSpec(NamedTuple):
    """Attention of one layer, of all its heads; layers with equal specs form a group.

    ``scale`` multiplies q . k. ``window`` is the number of tokens that a token sees, itself included, ``None`` for all
    before it. ``softcap`` c turns a scaled score s into c tanh(s / c). With ``has_null_logit`` a learned logit of each
    query head takes part in the softmax, and no value belongs to it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_null_logit: bool = False
