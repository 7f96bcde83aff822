"""The tables' copy on the device against the books, through random histories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from qkv_engine.device import tables as device_tables
from qkv_engine.device.tables import DeviceTables
from qkv_engine.kernels.block_tables import HEADER, RUNG_BITS, pack_tokens, update
from qkv_engine.kernels.paged_decode.split import most_items
from qkv_engine.kv.group import GroupTables
from qkv_engine.kv.table import BlockTables

from ...scheduler.common import BLOCK, RUNGS, make_space, make_spec
from .copies import Copy
from .test_table import TablesMachine

SPLIT, ROWS = 2, 4


def send(copy: Copy, tables: BlockTables, names: list[str], had: list[int] | None = None) -> list[int]:
    """What a step does: the changes go to the device with its input. ``had`` are the rows of the step before."""
    rows = had if had is not None and copy.keep_up(tables) else copy.follow(tables, names)
    words = copy.step_input(pack_tokens([7] * len(names), [0] * len(names), rows))
    step_input = torch.frombuffer(words, dtype=torch.int64)
    assert step_input[HEADER : HEADER + len(names)].tolist() == [7] * len(names)
    update(copy.block_words[0], step_input, len(names))
    return rows


def check(copy: DeviceTables, tables: GroupTables, names: list[str], rows: list[int]) -> None:
    own = copy.block_words[tables.index]
    words, numbers = own.words, own.words[own.num_numbers :]
    assert len(set(rows)) == len(rows) and all(0 <= row < copy.spare_row for row in rows)
    items = [0] * len(tables.spec.rungs)
    for name, row in zip(names, rows, strict=True):
        blocks = tables.entries(tables[name])
        found = words[numbers.view(-1, own.width)[row, : len(blocks)]]
        assert (found >> RUNG_BITS).tolist() == [block.slot.address for block in blocks]
        rungs = [max(0, block.rung) for block in blocks]
        assert (found & (1 << RUNG_BITS) - 1).tolist() == rungs
        for rung in range(len(items)):
            items[rung] += -(-rungs.count(rung) // SPLIT)
        addresses, on_host = copy.groups[tables.index].entries([row], len(blocks))
        assert torch.equal(addresses[0], found >> RUNG_BITS) and on_host[0].tolist() == rungs
    bounds = [most_items(count, len(names), SPLIT) for count in copy.num_blocks[tables.index]]
    assert all(n <= bound for n, bound in zip(items, bounds, strict=True))


class CopyMachine(TablesMachine):
    """The history of ``TablesMachine``, of which the copy is told now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = Copy(self.tables, ROWS, 32 + 6 * BLOCK)
        self.rows: dict[str, int] = {}  # of the step before

    @precondition(lambda self: 0 < len(self.tokens) <= ROWS)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1))
        self.rows = dict(zip(names, send(self.copy, self.tables, names), strict=True))
        check(self.copy, self.tables.main, names, list(self.rows.values()))

    @precondition(lambda self: self.rows and self.rows.keys() <= self.tokens.keys())
    @rule()
    def step_on(self) -> None:
        """The same requests once more, whose rows are still known if nobody's table was opened."""
        names = list(self.rows)
        check(self.copy, self.tables.main, names, send(self.copy, self.tables, names, list(self.rows.values())))

    @rule()
    def lose_an_input(self) -> None:
        self.copy.rows.forget()


TestCopyMachine = CopyMachine.TestCase
TestCopyMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, derandomize=True)


def test_more_updates_than_an_input_carries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_tables, "MAX_UPDATES", 5)
    ladder = make_spec(RUNGS, sink=32, sink_nbytes=4)
    tables = make_space(60, ladder).tables
    copy = Copy(tables, 3, 20 * BLOCK)
    for name in "abc":
        tables.open(name, 2)
        assert tables.reserve(name, 17 * BLOCK)
    check(copy, tables.main, list("abc"), send(copy, tables, list("abc")))
    assert tables.demote([(block, 1) for block in tables.main["b"].blocks]) == len(tables.main["b"].blocks)
    check(copy, tables.main, list("cb"), send(copy, tables, list("cb")))


def test_only_what_changed_is_sent():
    tables = make_space(60).tables
    copy = Copy(tables, 2, 20 * BLOCK)
    tables.open("a", 0)
    assert tables.reserve("a", 9 * BLOCK)
    sizes = []
    for reserved in (9, 9, 10):
        assert tables.reserve("a", reserved * BLOCK)
        copy.follow(tables, ["a"])
        sizes.append(int(copy.step_input(pack_tokens([1], [0], [0]))[0]))
    assert sizes == [18, 0, 2]  # each block's word and its entry


def test_other_books_are_taken_over_from_nothing():
    copies = [make_space(60).tables for _ in range(2)]
    copy = Copy(copies[0], 1, 20 * BLOCK)
    for tables, length in zip(copies, (3, 5), strict=True):
        tables.open("a", 0)
        assert tables.reserve("a", length * BLOCK)
        check(copy, tables.main, ["a"], send(copy, tables, ["a"]))
