"""Work plans of a gated delta-net on the GPU: where the states of a step's requests are, and chunks of their tokens.

They are the same for all layers with a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..to_device import to_device
from .cpu import CHUNK


@dataclass(frozen=True)
class StepWork:
    """Single tokens, one a request.

    Shapes:  words [L, B] int64 of each layer's states, as in the block tables: address and steps down;
             lengths [B] int32, tokens of the request up to and including this one, 0 for padding
    A state begins with zeros at a request's first token.
    """

    words: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class ChunkWork:
    """Tokens of several requests, whose rows follow one another, in chunks of at most ``CHUNK`` of one request.

    Shapes:  words [L, I] int64 of each layer's states, as in ``StepWork``;
             items [I, 4] int32 (first row, tokens, whether they are the request's first, first chunk);
             chunks [M, 3] int32 (first row, tokens, item)
    """

    words: Tensor
    items: Tensor
    chunks: Tensor

    @classmethod
    def build(cls, words: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> ChunkWork:
        """``counts`` tokens from positions ``starts`` of each request, whose ``words`` are those of each layer."""
        items, chunks, row = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for item, (start, count) in enumerate(zip(starts, counts, strict=True)):
            items.append((row, count, int(not start), len(chunks)))
            chunks += [(row + first, min(CHUNK, count - first), item) for first in range(0, count, CHUNK)]
            row += count
        numbers = (torch.tensor(rows, dtype=torch.int32, device="cpu") for rows in (items, chunks))
        return cls(torch.tensor(words, dtype=torch.int64, device="cpu").T.contiguous(), *numbers)

    def to(self, device: torch.device) -> ChunkWork:
        """The same plan on another device."""
        return ChunkWork(*(to_device(x, device) for x in (self.words, self.items, self.chunks)))
