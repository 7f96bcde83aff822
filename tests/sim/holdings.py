"""What requests hold and lack in all groups, reckoned from their tables alone."""

from __future__ import annotations

from math import inf
from typing import Any

from .broken import require
from .options import Group, Options


class Holdings:
    """Reads the tables of requests in ``tables``."""

    def __init__(self, tables: Any, options: Options):
        self._tables, self.options = tables, options

    def end_of(self, group: Group, table: Any, block: Any) -> float:
        """The token behind a block; a slot without tokens has none."""
        if block.rung >= 0:
            return group.end(table.first + table.blocks.index(block))
        return group.sink if group.sink and block.rung == -1 else inf

    def is_due(self, request: Any) -> bool:
        """Whether a request holds something that no later token of it sees."""
        computed = request.num_computed_tokens
        return any(
            table.first < group.num_passed(computed)
            or (group.sink and table.num_slots == len(table.slots) > 0 and not group.sees_sink(computed))
            for group, table in zip(self.options.groups, self.tables_of(request), strict=True)
        )

    def tables_of(self, request: Any) -> list[Any]:
        """The tables of a request by group."""
        return self._tables.of(request.request_id)

    def blocks_of(self, request: Any) -> list[Any]:
        """Slots and blocks of a request in all groups."""
        return [block for table in self.tables_of(request) for block in table]

    def lacks_block(self, request: Any) -> bool:
        table = self.tables_of(request)[0]
        held = self.options.sink + (table.first + len(table.blocks)) * self.options.block
        return bool(request.num_computed_tokens + 1 > held)

    def held(self, request: Any) -> int:
        """Tokens that the blocks of a request have room for, those given back included."""
        options, tables = self.options, self.tables_of(request)
        numbers = {(bool(table.num_slots), table.first + len(table.blocks)) for table in tables}
        require(len(numbers) == 1 or not options.sink, "groups hold other tokens")
        require(len({number for _, number in numbers}) == 1, "groups hold other tokens")
        has_slots, number = max(numbers)
        return options.sink * has_slots + number * options.block

    def dense(self, number: int) -> list[int]:
        """Bytes of the slots of so many dense blocks in each group."""
        return [group.sizes[0] for group in self.options.groups] * number

    def num_missing(self, request: Any, num_tokens: int) -> int:
        """Blocks that the first tokens of a request lack."""
        table = self.tables_of(request)[0]
        return max(0, self.options.groups[0].blocks_for(num_tokens) - table.first - len(table.blocks))

    def lacking(self, request: Any, num_tokens: int, spare: int) -> list[int]:
        """Bytes of the slots that the first tokens of a request lack, and of ``spare`` blocks beside its own."""
        missing = self.num_missing(request, num_tokens)
        sizes = self.dense(missing and missing + spare)
        for group, table in zip(self.options.groups, self.tables_of(request), strict=True):
            sizes += [group.size(rung) for rung in table.slot_rungs[table.num_slots :]]
        return sizes
