"""Layout of block tables and of a step's input in memory: tensors of int64 words."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_UPDATES = 1024  # words of the tables that one step's input may change; more go ahead in inputs of their own
HEADER = 3  # words before a step's tokens: number of updates, offset of all positions, most blocks of a work item
ITEM_BLOCKS = 2  # index of the header's last word


@dataclass(frozen=True)
class BlockWords:
    """Block tables of many requests, one a row.

    Shapes:  words [M + N * P] int64: for each of M block numbers ``address << RUNG_BITS | rung``, then the block
             numbers of each of N rows, P a row, the sink first
    Units:   addresses in bytes; a sink's rung is 0
    ``has_bank``: a row's last entry is the number of the request's bank, in whose word the rung is not used.
    """

    words: Tensor
    num_numbers: int
    width: int
    sink_tokens: int
    block_tokens: int
    has_bank: bool = False


@dataclass(frozen=True)
class Placed:
    """A step's tokens, those of padding included.

    Shapes:  input_ids, positions [N] int64;  rows [N] int64, the table row of each token's request;
             lengths [N] int32, tokens of the request up to and including this one, 0 for padding;
             token_rows [N, 2] int64, the place of K and V as in ``rope_kv_write``: row -1 for padding
    """

    input_ids: Tensor
    positions: Tensor
    rows: Tensor
    lengths: Tensor
    token_rows: Tensor


def pack_tokens(ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> array[int]:
    """A step's tokens, [3 N] int64.

    An id of -1 stands for the token sampled last for that row, which may be on the device alone. Padding has position
    -1 in every step.
    """
    return array("q", ids) + array("q", positions) + array("q", rows)


def pack_input(
    tokens: array[int], updates: Sequence[tuple[int, int]], advance: int = 0, item_blocks: int = 1
) -> array[int]:
    """A step's input on the host, [HEADER + 3 N + 2 U] int64: ``tokens``, with ``advance`` added to all positions.

    ``item_blocks``: the most blocks of a work item of decode attention. ``updates``: (index, value) pairs of
    ``BlockWords.words``, at most ``MAX_UPDATES``.
    """
    changes = [word for pair in updates for word in pair]
    return array("q", [len(updates), advance, item_blocks]) + tokens + array("q", changes)


def input_nwords(num_tokens: int, num_updates: int = MAX_UPDATES) -> int:
    """Words of a step's input."""
    return HEADER + 3 * num_tokens + 2 * num_updates
