"""The block tables' copy on the device: changes since the last step travel with the step's input.

Each request has a row of block numbers, and each number a word with the block's address and rung. So a block that moves
changes one word, however many requests hold it, and a new block changes its own word and one entry of a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv_engine.device.pinned import to_device
from qkv_engine.kernels.block_tables import MAX_UPDATES, RUNG_BITS, BlockWords, pack_input, pack_tokens, update

from ..config import BLOCK_TOKENS
from .block import Block, BlockTable, Journal, slot_rung
from .table import BlockTables


@dataclass(slots=True, eq=False)
class Row:
    """A request's row: the table it copies and how many of its entries it has."""

    index: int
    table: BlockTable
    num_entries: int = 0


class DeviceTables:
    """Mirrors the tables of up to ``num_rows`` requests of up to ``max_tokens`` tokens. Owned by the runner.

    ``block_words`` is what kernels read; ``last_tokens`` [rows + 1] int64 holds the token sampled last for each row,
    and row ``spare_row``, which no request has, is for padding. ``mirror`` is the host's copy of the words.
    """

    def __init__(self, tables: BlockTables, num_rows: int, max_tokens: int, device: torch.device):
        ladder = tables.ladder
        # One entry to spare, and at least what the warm-up request holds: two blocks more than there are rungs.
        has_bank = ladder.has_bank
        width = bool(ladder.sink) + 1 + max(tables.blocks_for(max_tokens), len(ladder.rungs) + 2) + has_bank
        num_words = tables.max_blocks + (num_rows + 1) * width
        self.ladder, self.device = ladder, device
        self._words = array("q", bytes(8 * num_words))
        self.mirror = torch.frombuffer(self._words, dtype=torch.int64)
        words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.block_words = BlockWords(words, tables.max_blocks, width, ladder.sink, BLOCK_TOKENS, has_bank)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.spare_row = num_rows
        self._tables: BlockTables | None = None
        self._rows: dict[str, Row] = {}
        self._free: list[int] = []
        self._changed: list[int] = []  # indices of words not yet sent to the device

    def follow(self, tables: BlockTables, request_ids: Iterable[str]) -> list[int]:
        """Takes over the changes of ``tables`` and returns the rows of ``request_ids``, which have tables there.

        Costs as much as has changed. Another ``BlockTables`` than last time is copied whole.
        """
        self.keep_up(tables)
        rows = []
        for request_id in request_ids:
            table, row = tables[request_id], self._rows.get(request_id)
            if row is None or row.table is not table:
                row = self._open(request_id, table)
            rows.append(row.index)
        return rows

    def keep_up(self, tables: BlockTables) -> bool:
        """``follow`` for requests that were followed before; ``False`` if they may have other rows now."""
        if tables is not self._tables:
            self._begin(tables)
        assert tables.journal is not None
        journal, tables.journal = tables.journal, Journal()
        for block in journal.blocks:
            self._set(block.number, _word(block))
        for request_id in journal.grown:
            row = self._rows.get(request_id)
            if row is not None and request_id in tables and row.table is tables[request_id]:
                self._extend(row)
        return not journal.opened

    def step_input(self, tokens: array[int], advance: int = 0, item_blocks: int = 1) -> array[int]:
        """A step's input for ``tokens``, with as many updates as it may carry; see ``pack_input``.

        Updates beyond that number are sent at once, in inputs of their own.
        """
        while len(self._changed) > MAX_UPDATES:
            self._flush()
        updates = [(index, self._words[index]) for index in self._changed]
        self._changed.clear()
        return pack_input(tokens, updates, advance, item_blocks)

    def entries(self, rows: Sequence[int], num_entries: int) -> tuple[Tensor, Tensor]:
        """Addresses and rungs [B, ``num_entries``] int64 of the first entries of some rows, on the host.

        Values behind a row's last entry are undefined.
        """
        words = self.block_words
        numbers = self.mirror[words.num_numbers :].view(-1, words.width)[list(rows), :num_entries]
        found = self.mirror[numbers]
        return found >> RUNG_BITS, found & (1 << RUNG_BITS) - 1

    def banks(self, rows: Sequence[int]) -> Tensor | None:
        """Addresses [B] int64 of the banks of some rows, on the host; ``None`` without patterns."""
        words = self.block_words
        if not words.has_bank:
            return None
        return self.mirror[self.mirror[words.num_numbers :].view(-1, words.width)[list(rows), -1]] >> RUNG_BITS

    def num_entries(self) -> list[int]:
        """Entries of all requests together on each rung; sinks count on the first."""
        assert self._tables is not None
        held = self._tables.num_entries
        counts = [held[rung] for rung in range(len(self.ladder.rungs))]
        counts[0] += held[slot_rung(0)] if self.ladder.sink else 0
        return counts

    def forget(self) -> None:
        """Has the next input bring everything; to be called when a step's input may not have reached the device."""
        self._tables = None

    def _begin(self, tables: BlockTables) -> None:
        self._tables, self._rows, self._changed = tables, {}, []
        self._free = list(range(self.spare_row))
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
        first = self.block_words.num_numbers + row.index * self.block_words.width
        if row.table.bank is not None and not row.num_entries:
            self._set(first + self.block_words.width - 1, row.table.bank.block.number)
        # A slot that holds no tokens has a number, but no entry: no kernel reads it.
        for block in self._tables.entries(row.table)[row.num_entries :]:
            self._set(first + row.num_entries, block.number)
            row.num_entries += 1

    def _set(self, index: int, word: int) -> None:
        self._words[index] = word
        self._changed.append(index)

    def _flush(self) -> None:
        """Sends the first ``MAX_UPDATES`` updates."""
        later = self._changed[MAX_UPDATES:]
        del self._changed[MAX_UPDATES:]
        step_input = torch.frombuffer(self.step_input(pack_tokens((), (), ())), dtype=torch.int64)
        update(self.block_words, to_device(step_input, self.device), 0)
        self._changed = later


def _word(block: Block) -> int:
    return block.slot.address << RUNG_BITS | max(0, block.rung)
