"""Block tables as words for a backend: requests get rows, and changes of the books become changes of words.

Each request has a row of block numbers, and each number a word with the block's address and rung. So a block that moves
changes one word, however many requests hold it, and a new block changes its own word and one entry of a row. Each group
of layers has words of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..table_words import RUNG_BITS
from .block import Block, BlockTable, Journal, slot_rung
from .group import GroupTables
from .spec import GroupSpec
from .table import BlockTables

SECTION_ALIGN = 16  # words: sections begin on a cache line


@dataclass(frozen=True, slots=True)
class Section:
    """Words of a group's tables, from ``base`` on: one for each of ``num_numbers`` blocks, then the rows.

    A row has ``width`` block numbers. With ``has_bank`` its last entry is the number of the request's bank; before it
    come those of the request's ``num_states`` states.
    """

    base: int
    num_numbers: int
    width: int
    has_bank: bool
    num_states: int = 0

    @classmethod
    def of(cls, tables: GroupTables, base: int, max_tokens: int, least: int) -> Section:
        """For requests of up to ``max_tokens`` tokens, and of ``least`` blocks."""
        group = tables.spec
        most = max(group.blocks_for(max_tokens), least)
        # One entry to spare.
        width = group.num_token_slots + 1 + most + group.num_states + group.has_bank
        return cls(base, tables.max_blocks, width, group.has_bank, group.num_states)

    @property
    def first_state(self) -> int:
        """Index in a row of the first state's entry."""
        return self.width - self.has_bank - self.num_states

    def first(self, row: int) -> int:
        """Index of a row's first entry among all words."""
        return self.base + self.num_numbers + row * self.width


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Words of the tables of up to ``num_rows`` requests, a section a group.

    There is one row more than requests, ``spare_row``, for padding.
    """

    num_rows: int
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, tables: BlockTables, num_rows: int, max_tokens: int) -> TableLayout:
        """For up to ``num_rows`` requests of up to ``max_tokens`` tokens."""
        # At least what the warm-up request holds: two blocks more than there are rungs.
        least = max(len(group.rungs) for group in tables.spec.groups) + 2
        sections, base = list[Section](), 0
        for group in tables.groups:
            sections.append(Section.of(group, base, max_tokens, least))
            base = -(-sections[-1].first(num_rows + 1) // SECTION_ALIGN) * SECTION_ALIGN
        return cls(num_rows, tuple(sections))

    @property
    def num_words(self) -> int:
        return self.sections[-1].first(self.num_rows + 1)

    @property
    def spare_row(self) -> int:
        return self.num_rows


@dataclass(slots=True, eq=False)
class Row:
    """A request's row: the tables that it copies, one a group, and how many entries it has of each."""

    index: int
    tables: list[BlockTable]
    num_entries: list[int]


class TableRows:
    """Follows the books: gives requests rows, and gathers the words that change."""

    def __init__(self, layout: TableLayout):
        self.layout = layout
        self._tables: BlockTables | None = None
        self._rows: dict[str, Row] = {}
        self._free: list[int] = []
        self._changes: list[int] = []

    def follow(self, tables: BlockTables, request_ids: Iterable[str]) -> list[int]:
        """Takes over the changes of ``tables`` and returns the rows of ``request_ids``, which have tables there.

        Costs as much as has changed. Another ``BlockTables`` than last time is taken over whole.
        """
        self.keep_up(tables)
        rows = []
        for request_id in request_ids:
            row = self._rows.get(request_id)
            if row is None or not self._is_current(request_id, row):
                row = self._open(request_id)
            rows.append(row.index)
        return rows

    def keep_up(self, tables: BlockTables) -> bool:
        """``follow`` for requests that were followed before; ``False`` if they may have other rows now."""
        if tables is not self._tables:
            self._begin(tables)
        is_known = True
        for group, section in zip(tables.groups, self.layout.sections, strict=True):
            assert group.journal is not None
            journal, group.journal = group.journal, Journal()
            for block in journal.blocks:
                self._changes += section.base + block.number, _word(block, group.spec)
            for request_id in journal.grown:
                row = self._rows.get(request_id)
                if row is not None and self._is_current(request_id, row):
                    self._extend(row, group, section)
            is_known &= not journal.opened
        return is_known

    def take_changes(self) -> list[int]:
        """Words that changed since the last call, index and value in turns, in order."""
        changes, self._changes = self._changes, []
        return changes

    def num_entries(self) -> list[list[int]]:
        """Entries of all requests together by group and rung; their slots count on the first."""
        assert self._tables is not None
        found = []
        for group in self._tables.groups:
            counts = [group.num_entries[rung] for rung in range(len(group.spec.rungs))]
            counts[0] += group.num_entries[slot_rung(0)] if group.spec.num_token_slots else 0
            found.append(counts)
        return found

    def forget(self) -> None:
        """Has the next changes bring everything; to be called when changes may not have reached the backend."""
        self._tables = None

    def _begin(self, tables: BlockTables) -> None:
        self._tables, self._rows, self._changes = tables, {}, []
        self._free = list(range(self.layout.num_rows))
        for group in tables.groups:
            group.journal = Journal(group.live_blocks(), opened=True)

    def _is_current(self, request_id: str, row: Row) -> bool:
        """Whether a row copies the tables that the request has now."""
        assert self._tables is not None
        first = self._tables.groups[0]
        return request_id in first and first[request_id] is row.tables[0]

    def _open(self, request_id: str) -> Row:
        assert self._tables is not None
        old = self._rows.pop(request_id, None)
        if old is not None:
            self._free.append(old.index)
        if not self._free:
            self._sweep()
        tables = self._tables.of(request_id)
        row = self._rows[request_id] = Row(self._free.pop(), tables, [0] * len(tables))
        for group, section in zip(self._tables.groups, self.layout.sections, strict=True):
            self._extend(row, group, section)
        return row

    def _sweep(self) -> None:
        """Frees the rows of requests that are gone."""
        for request_id, row in list(self._rows.items()):
            if not self._is_current(request_id, row):
                del self._rows[request_id]
                self._free.append(row.index)

    def _extend(self, row: Row, group: GroupTables, section: Section) -> None:
        """Adds the entries that the row lacks. Those of blocks that were given back stay as they are: unread."""
        table, first, had = row.tables[group.index], section.first(row.index), row.num_entries[group.index]
        if not table.num_slots and not table.blocks:
            return
        if table.bank is not None and not had:
            self._changes += first + section.width - 1, table.bank.block.number
        if not had and section.num_states:
            states = table.slots[-section.num_states - section.has_bank :]
            for index, state in enumerate(states[: section.num_states], section.first_state):
                self._changes += first + index, state.number
        if not had and (sink := group.sink_slot(table)):
            self._changes += first, sink[0].number
        begin = group.spec.num_token_slots + table.first
        end = begin + len(table.blocks)
        for index in range(max(begin, had), end):
            self._changes += first + index, table.blocks[index - begin].number
        row.num_entries[group.index] = end


def _word(block: Block, spec: GroupSpec) -> int:
    """The address of a block or a slot, and how far it has stepped down."""
    return block.slot.address << RUNG_BITS | spec.step_of(block.rung)
