"""Work plans of a gated delta-net on the GPU: where the states of a step's requests are, and chunks of their tokens.

They are the same for all layers with a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..to_device import all_to_device
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
    Items and chunks of padding have no tokens; such items count as a request's first tokens, and words mean nothing.
    """

    words: Tensor
    items: Tensor
    chunks: Tensor

    @classmethod
    def build(cls, words: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> ChunkWork:
        """``counts`` tokens from positions ``starts`` of each request, whose ``words`` are those of each layer."""
        number = np.array(counts)
        num_chunks = -(-number // CHUNK)
        row, chunk = number.cumsum() - number, num_chunks.cumsum() - num_chunks
        items = np.stack((row, number, np.array(starts) == 0, chunk), 1)
        item = np.arange(len(number)).repeat(num_chunks)
        first = (np.arange(len(item)) - chunk[item]) * CHUNK
        chunks = np.stack((row[item] + first, (number[item] - first).clip(max=CHUNK), item), 1)
        numbers = (torch.from_numpy(rows.astype(np.int32)) for rows in (items, chunks))
        return cls(torch.from_numpy(np.array(words, dtype=np.int64).T.copy()), *numbers)

    def to(self, device: torch.device) -> ChunkWork:
        """The same plan on another device."""
        return ChunkWork(*all_to_device((self.words, self.items, self.chunks), device))
