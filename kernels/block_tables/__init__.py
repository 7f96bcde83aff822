"""Block tables on the device: ``update`` applies the changes since the last step, ``place`` locates a step's tokens.

A step's input is one tensor of int64 words, so that it comes to the device in one copy.
"""

from __future__ import annotations

from torch import Tensor

from qkv_engine.table_words import RUNG_BITS

from .reference import entry_words_reference, place_reference, update_reference
from .words import (
    HEADER,
    ITEM_BLOCKS,
    MAX_UPDATES,
    BlockWords,
    Placed,
    input_nwords,
    pack_input,
    pack_tokens,
)


def update(tables: BlockWords, step_input: Tensor, num_tokens: int) -> None:
    """Applies the updates in a step's input of ``num_tokens`` tokens to ``tables.words``."""
    if step_input.is_cuda:
        from .triton import update_triton

        update_triton(tables, step_input, num_tokens)
    else:
        update_reference(tables, step_input, num_tokens)


def place(tables: BlockWords, step_input: Tensor, num_tokens: int, last_tokens: Tensor, row_nbytes: int) -> Placed:
    """Locates the tokens of a step's input: their ids, positions, requests' rows and rows for K and V.

    Shapes:  step_input as ``pack_input`` makes it;  last_tokens [N] int64, of each row of the tables
    ``row_nbytes``: bytes of D elements in the dense pages' dtype.
    """
    if step_input.is_cuda:
        from .triton import place_triton

        return place_triton(tables, step_input, num_tokens, last_tokens, row_nbytes)
    return place_reference(tables, step_input, num_tokens, last_tokens, row_nbytes)


def entry_words(tables: BlockWords, rows: Tensor, first: int, number: int) -> Tensor:
    """The words [number, B] of the blocks in entries ``first`` to ``first + number - 1`` of each of ``rows`` [B]."""
    if rows.is_cuda:
        from .triton import entry_words_triton

        return entry_words_triton(tables, rows, first, number)
    return entry_words_reference(tables, rows, first, number)


__all__ = [
    "HEADER",
    "ITEM_BLOCKS",
    "MAX_UPDATES",
    "RUNG_BITS",
    "BlockWords",
    "Placed",
    "entry_words",
    "input_nwords",
    "pack_input",
    "pack_tokens",
    "place",
    "update",
]
