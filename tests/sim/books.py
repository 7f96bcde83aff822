"""What the checkers read of the books, by group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def groups_of(tables: Any) -> Sequence[Any]:
    """Tables, counters and numbers of blocks of each group."""
    return (tables,)


def store_of(tables: Any) -> Any:
    """Slots and moves of all groups."""
    return tables


def tables_of(tables: Any, request_id: str) -> list[Any]:
    """The tables of a request by group."""
    return [tables[request_id]]


def first_of(table: Any) -> int:
    """Blocks of a request that were given back."""
    return 0


def num_slots_of(table: Any) -> int:
    """Slots of a request that were taken."""
    return len(table.slots)


def group_of(block: Any) -> int:
    """The group of a block."""
    return 0


def least_reserve(code: Any, options: Any) -> int:
    """Bytes that are kept for demotions whatever requests run."""
    return int(code.table.reserve_nbytes(options.sizes, options.slab_nbytes))
