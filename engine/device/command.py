"""A step as plain data, the same for every device and for every rank that holds a share of the heads."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from ..sampling.sample_tables import SampleTables


class PromptScores(NamedTuple):
    """Log-probabilities of ``targets``, which follow the first tokens of an item, and of the ``k`` likeliest there.

    ``others``: further token ids, a list for each target; none for no others at all.
    """

    item: int
    targets: list[int]
    k: int
    others: list[list[int]]


class StepCommand(msgspec.Struct, frozen=True, gc=False, tag="step"):
    """A step over block tables whose rows and words the executing backend keeps.

    Fields
        changes: words of the tables that changed since the command before, index and value in turns.
        num_blocks: table entries by group and rung, all requests together; their slots count on the first rung.
        goes_on: the items are those of the command before in the same order, each a single token that was sampled
            there; ``rows``, ``starts``, ``lengths`` and ``ids`` are empty then.
        rows, starts, lengths: table row, first position and number of tokens of each item, single tokens first.
        ids: the tokens of all items; -1 stands for the one sampled last in the item's row.
        sampling: items that sample a token.
        tables: how they do; ``None``: all take the likeliest token.
        prompt_scores: of the items that want some.
    """

    changes: list[int]
    num_blocks: list[list[int]]
    goes_on: bool
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    ids: list[int]
    sampling: list[int]
    tables: SampleTables | None
    prompt_scores: list[PromptScores]

    @property
    def is_decode(self) -> bool:
        """Whether the step is made of single tokens alone and nothing but tokens comes of it."""
        return self.goes_on or (self.lengths[-1] == 1 and not self.prompt_scores)


class Tokens(NamedTuple):
    """Ids, positions and rows of the tables of some tokens of a step."""

    ids: array[int]
    positions: array[int]
    rows: array[int]

    @classmethod
    def single(cls, rows: Sequence[int] = (), positions: Sequence[int] = (), ids: Sequence[int] = ()) -> Tokens:
        """Single tokens, or none."""
        return cls(array("q", ids), array("q", positions), array("q", rows))

    @classmethod
    def of(cls, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], ids: Sequence[int]) -> Tokens:
        """Runs of tokens, each of one row from its start on, one after another."""
        found = cls(array("q"), array("q"), array("q"))
        found.ids.frombytes(struct.pack(f"{len(ids)}q", *ids))  # in a third of the array's own time
        for row, start, length in zip(rows, starts, lengths, strict=True):
            found.positions.frombytes(np.arange(start, start + length, dtype=np.int64).tobytes())
            found.rows.extend(array("q", [row]) * length)
        return found

    def padded(self, number: int, spare_row: int) -> Tokens:
        """The tokens followed by padding, ``number`` in all."""
        padding = (array("q", [word]) * (number - len(self.ids)) for word in (0, -1, spare_row))
        return Tokens(*(column + more for column, more in zip(self, padding, strict=True)))

    def packed(self, *others: Tokens) -> array[int]:
        """The words of the tokens and of ``others`` behind them, as ``pack_tokens`` orders them."""
        words = array("q")
        for part in chain.from_iterable(zip(self, *others, strict=True)):
            words.extend(part)
        return words
