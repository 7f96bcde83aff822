"""A step as plain data, the same for every device and for every rank that holds a share of the heads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from qkv_engine.kernels.block_tables import pack_tokens

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

    ids: list[int]
    positions: list[int]
    rows: list[int]

    @classmethod
    def of(cls, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], ids: list[int]) -> Tokens:
        """Runs of tokens, each of one row from its start on, one after another."""
        found = cls(ids, [], [])
        for row, start, length in zip(rows, starts, lengths, strict=True):
            found.positions.extend(range(start, start + length))
            found.rows.extend([row] * length)
        return found

    def padded(self, number: int, spare_row: int) -> Tokens:
        """The tokens followed by padding, ``number`` in all."""
        padding = number - len(self.ids)
        return Tokens(self.ids + [0] * padding, self.positions + [-1] * padding, self.rows + [spare_row] * padding)

    def packed(self, *others: Tokens) -> array[int]:
        """The words of the tokens and of ``others`` behind them, as a step's input wants them."""
        return pack_tokens(*(list(chain(*column)) for column in zip(self, *others, strict=True)))
