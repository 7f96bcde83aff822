"""What a token of a request takes on a rung, where layers with a window hold the request's newest tokens alone."""

from __future__ import annotations

from typing import NamedTuple

from .layouts import Ladder


class PerToken(NamedTuple):
    """``nbytes`` of a token in all layers, and bits of a KV element: of codes alone, and with every byte counted."""

    nbytes: float
    code_bits: float
    bits: float


def per_token(ladder: Ladder, rung: int, context: int) -> PerToken:
    """The mean over a request of ``context`` tokens whose blocks all stand on the ladder's ``rung``.

    Layers count by the tokens that the last one sees: ``context``, or the window where that is less. The rest of an
    open block, the sink and what stays dense beside it are not counted.
    """
    nbytes = codes = elements = 0.0
    for group, found in zip(ladder.groups, ladder.at(rung), strict=True):
        held = min(context, group.visible or context) / found.shape.num_tokens  # blocks
        nbytes += held * found.block_nbytes
        codes += held * (found.codes_nbytes + found.dense_nbytes)
        elements += held * found.num_elements
    return PerToken(nbytes / context, 8 * codes / elements, 8 * nbytes / elements)
