"""Block tables and a backend's copy of them, without a runner in between."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qkv_engine.device.tables import DeviceTables
from qkv_engine.kv.table import BlockTables
from qkv_engine.kv.table_rows import TableLayout, TableRows


class Copy(DeviceTables):
    """A copy on the CPU that takes over the changes itself; ``rows`` follow the books."""

    def __init__(self, tables: BlockTables, num_rows: int, max_tokens: int):
        layout = TableLayout.of(tables, num_rows, max_tokens)
        super().__init__(layout, tables.spec, torch.device("cpu"))
        self.rows = TableRows(layout)

    def follow(self, tables: BlockTables, names: Iterable[str]) -> list[int]:
        found = self.rows.follow(tables, names)
        self._take()
        return found

    def keep_up(self, tables: BlockTables) -> bool:
        is_known = self.rows.keep_up(tables)
        self._take()
        return is_known

    def _take(self) -> None:
        changes = self.rows.take_changes()
        self.has_changed = bool(changes)
        self.apply(changes)
        self.num_blocks = self.rows.num_entries()
