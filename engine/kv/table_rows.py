"""Block tables as words for a backend: requests get rows, and changes of the books become changes of words.

Each request has a row of block numbers, and each number a word with the block's address and rung. So a block that moves
changes one word, however many requests hold it, and a new block changes its own word and one entry of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..table_words import RUNG_BITS
from .block import Block, BlockTable, Journal, slot_rung
from .group import GroupTables
from .spec import GroupSpec


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Words of the tables: one for each of ``num_numbers`` blocks, then ``width`` block numbers for each row.

    There is one row more than requests, ``spare_row``, for padding. With ``has_bank`` the last entry of a row is the
    number of the request's bank.
    """

    num_numbers: int
    num_rows: int
    width: int
    has_bank: bool

    @classmethod
    def of(cls, tables: GroupTables, num_rows: int, max_tokens: int) -> TableLayout:
        """For up to ``num_rows`` requests of up to ``max_tokens`` tokens."""
        group = tables.spec
        # One entry to spare, and at least what the warm-up request holds: two blocks more than there are rungs.
        most = max(group.blocks_for(max_tokens), len(group.rungs) + 2)
        return cls(tables.max_blocks, num_rows, group.num_token_slots + 1 + most + group.has_bank, group.has_bank)

    @property
    def num_words(self) -> int:
        return self.num_numbers + (self.num_rows + 1) * self.width

    @property
    def spare_row(self) -> int:
        return self.num_rows

    def first(self, row: int) -> int:
        """Index of a row's first entry."""
        return self.num_numbers + row * self.width


@dataclass(slots=True, eq=False)
class Row:
    """A request's row: the table it copies and how many of its entries it has."""

    index: int
    table: BlockTable
    num_entries: int = 0


class TableRows:
    """Follows the books: gives requests rows, and gathers the words that change."""

    def __init__(self, layout: TableLayout, group: GroupSpec):
        self.layout, self.group = layout, group
        self._tables: GroupTables | None = None
        self._rows: dict[str, Row] = {}
        self._free: list[int] = []
        self._changes: list[int] = []

    def follow(self, tables: GroupTables, request_ids: Iterable[str]) -> list[int]:
        """Takes over the changes of ``tables`` and returns the rows of ``request_ids``, which have tables there.

        Costs as much as has changed. Another ``GroupTables`` than last time is taken over whole.
        """
        self.keep_up(tables)
        rows = []
        for request_id in request_ids:
            table, row = tables[request_id], self._rows.get(request_id)
            if row is None or row.table is not table:
                row = self._open(request_id, table)
            rows.append(row.index)
        return rows

    def keep_up(self, tables: GroupTables) -> bool:
        """``follow`` for requests that were followed before; ``False`` if they may have other rows now."""
        if tables is not self._tables:
            self._begin(tables)
        assert tables.journal is not None
        journal, tables.journal = tables.journal, Journal()
        for block in journal.blocks:
            self._changes += block.number, _word(block)
        for request_id in journal.grown:
            row = self._rows.get(request_id)
            if row is not None and request_id in tables and row.table is tables[request_id]:
                self._extend(row)
        return not journal.opened

    def take_changes(self) -> list[int]:
        """Words that changed since the last call, index and value in turns, in order."""
        changes, self._changes = self._changes, []
        return changes

    def num_entries(self) -> list[int]:
        """Entries of all requests together on each rung; their slots count on the first."""
        assert self._tables is not None
        held = self._tables.num_entries
        counts = [held[rung] for rung in range(len(self.group.rungs))]
        counts[0] += held[slot_rung(0)] if self.group.num_token_slots else 0
        return counts

    def forget(self) -> None:
        """Has the next changes bring everything; to be called when changes may not have reached the backend."""
        self._tables = None

    def _begin(self, tables: GroupTables) -> None:
        self._tables, self._rows, self._changes = tables, {}, []
        self._free = list(range(self.layout.num_rows))
        tables.journal = Journal(tables.live_blocks(), opened=True)

    def _open(self, request_id: str, table: BlockTable) -> Row:
        old = self._rows.pop(request_id, None)
        if old is not None:
            self._free.append(old.index)
        if not self._free:
            self._sweep()
        row = self._rows[request_id] = Row(self._free.pop(), table)
        self._extend(row)
        return row

    def _sweep(self) -> None:
        """Frees the rows of requests that are gone."""
        assert self._tables is not None
        for request_id, row in list(self._rows.items()):
            if request_id not in self._tables or self._tables[request_id] is not row.table:
                del self._rows[request_id]
                self._free.append(row.index)

    def _extend(self, row: Row) -> None:
        """Adds the entries that the row lacks."""
        assert self._tables is not None
        first = self.layout.first(row.index)
        if row.table.bank is not None and not row.num_entries:
            self._changes += first + self.layout.width - 1, row.table.bank.block.number
        # A slot that holds no tokens has a number, but no entry: no kernel reads it.
        for block in self._tables.entries(row.table)[row.num_entries :]:
            self._changes += first + row.num_entries, block.number
            row.num_entries += 1


def _word(block: Block) -> int:
    return block.slot.address << RUNG_BITS | max(0, block.rung)
