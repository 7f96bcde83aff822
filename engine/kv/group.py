"""Block tables of one group of layers: the blocks of each request, their rungs, and which may step down. No torch."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .arena import ArenaError
from .bank import Bank
from .block import Block, BlockTable, Journal, slot_rung
from .spec import GroupSpec
from .store import BlockStore


class GroupTables:
    """The tables of all requests in one group, with ``index`` among the groups. Slots come from the ``store``."""

    def __init__(self, store: BlockStore, index: int, spec: GroupSpec):
        self.store, self.index, self.spec = store, index, spec
        self.sizes = {number: rung.nbytes for number, rung in enumerate(spec.rungs)}
        self.sizes |= {rung: spec.nbytes(rung) for rung in spec.slot_rungs}
        self.num_blocks: Counter[int] = Counter()  # live blocks by rung
        self.num_entries: Counter[int] = Counter()  # the same, each block once for every request that holds it
        self.journal: Journal | None = None  # changes, for the keeper of a copy of the tables
        self.floor_epoch = 0  # lifts of floors, each of which may unsettle settled blocks
        self._tables: dict[str, BlockTable] = {}
        self._spare_numbers: list[int] = []
        self._num_numbers = 0

    def __getitem__(self, request_id: str) -> BlockTable:
        return self._tables[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def max_blocks(self) -> int:
        """The most live blocks there can be; every block number is smaller."""
        return self.store.arena.range_nbytes // min(self.sizes.values())

    def live_blocks(self) -> list[Block]:
        """Every block of the group that owns a slot."""
        return [block for block in self.store.live_blocks() if block.group == self.index]

    # ---- blocks of a request

    def open(self, request_id: str, floor: int, shared: Iterable[Block], num_shared: int, num_prompt: int) -> None:
        """Begins the table of a request whose ``floor`` is a rung of the ladder.

        It begins on ``shared`` blocks, in token order: those of its first ``num_shared`` tokens that are in sight.
        """
        spec = self.spec
        table = self._tables[request_id] = BlockTable(
            spec.floors[floor], num_prompt, slot_rungs=[*spec.widest_rungs], slot_floors=spec.slot_floors(floor)
        )
        if self.journal is not None:
            self.journal.opened = True
        for block in shared:
            self.store.share(block)
            block.holders = tuple(sorted((*block.holders, table.floor)))
            self.num_entries[block.rung] += 1
            block.floor = block.holders[0]
            (table.slots if block.rung < 0 else table.blocks).append(block)
        table.num_slots = len(table.slots)
        if spec.visible is not None:
            table.first = spec.num_passed(num_shared)
            table.num_slots += spec.num_token_slots > 0 and not spec.sees_sink(num_shared)

    def missing_slots(self, request_id: str) -> list[int]:
        """Rungs of the slots of a request that were not taken yet."""
        table = self._tables[request_id]
        return table.slot_rungs[table.num_slots :]

    def begin_states(self, request_id: str, rungs: Iterable[int]) -> None:
        """Has the states of a request, which were not taken yet, begin on these ``rungs``."""
        first = self.spec.num_token_slots
        self._tables[request_id].slot_rungs[first : first + self.spec.num_states] = rungs

    def begin_narrower(self, request_id: str) -> bool:
        """Has the states of a request, which were not taken yet, begin a rung lower; ``False`` if it allows none."""
        table, first = self._tables[request_id], self.spec.num_token_slots
        states = slice(first, first + self.spec.num_states)
        had = table.slot_rungs[states]
        lower = [min(rung + 1, floor) for rung, floor in zip(had, table.slot_floors[states], strict=True)]
        table.slot_rungs[states] = lower
        return lower != had

    def add_blocks(self, request_id: str, number: int) -> None:
        """Gives a request the slots that it lacks, and ``number`` blocks more. There must be room."""
        table, spec = self._tables[request_id], self.spec
        for index in range(table.num_slots, len(spec.slots)):
            table.slots.append(self.store.new_block(self, table.slot_rungs[index], table.slot_floors[index]))
            table.num_slots += 1
        if spec.has_bank and table.bank is None:
            in_blocks = spec.in_blocks(table.num_prompt_tokens)
            table.bank = Bank(table.slots[-1], table.blocks, in_blocks, spec.block_tokens, spec.num_windows)
        for _ in range(number):
            table.blocks.append(self.store.new_block(self, 0, table.floor, table.bank))
        if self.journal is not None:
            self.journal.grown.append(request_id)

    def held(self, request_id: str) -> int:
        """Tokens that a request's blocks have room for, those given back included."""
        table, spec = self._tables[request_id], self.spec
        number = table.first + len(table.blocks)
        return spec.tokens_in(number) if number or table.num_slots else 0

    def entries(self, table: BlockTable) -> list[Block]:
        """The blocks of a request that hold tokens, in token order: its sink's slot comes first."""
        return [*self.sink_slot(table), *table.blocks]

    def piece(self, request_id: str, index: int) -> Block | None:
        """The slot of a request's sink, if there is one, or a block, numbered together; None if it was given back."""
        table = self._tables[request_id]
        if index < self.spec.num_token_slots:
            return next(iter(self.sink_slot(table)), None)
        number = index - self.spec.num_token_slots - table.first
        return table.blocks[number] if number >= 0 else None

    def sink_slot(self, table: BlockTable) -> Sequence[Block]:
        """The slot of a request's sink, if it has one."""
        has_sink = self.spec.num_token_slots and table.slots and table.slots[0].rung == slot_rung(0)
        return table.slots[: int(bool(has_sink))]

    def states(self, request_id: str) -> list[Block]:
        """The states of a request, in the order of their layers, once it has blocks."""
        return self._states(self._tables[request_id])

    def _states(self, table: BlockTable) -> list[Block]:
        first = self.spec.num_token_slots - (table.num_slots - len(table.slots))  # the sink's may be given back
        return table.slots[first : first + self.spec.num_states]

    def trim(self, request_id: str, num_computed: int) -> None:
        """Gives back the blocks of a request that no token from ``num_computed`` on sees."""
        table, spec = self._tables[request_id], self.spec
        if self.sink_slot(table) and not spec.sees_sink(num_computed):
            self._let_go(table.slots.pop(0), table.floor)
        number = spec.num_passed(num_computed) - table.first
        for block in table.blocks[:number]:
            self._let_go(block, table.floor)
        del table.blocks[:number]
        table.first += number
        table.num_settled = max(0, table.num_settled - number)

    def next_passed_at(self, request_id: str) -> int:
        """Count of computed tokens from which on ``trim`` gives something back."""
        table, spec = self._tables[request_id], self.spec
        if spec.visible is None:
            return sys.maxsize
        number = 0 if spec.num_token_slots and table.num_slots == len(table.slots) else table.first + 1
        return spec.visible - 1 + spec.tokens_in(number)

    def release(self, request_id: str) -> None:
        """Takes all blocks of a request back, the last first: the end of a prefix is worth less than its beginning."""
        table = self._tables.pop(request_id)
        for block in reversed([*table]):
            self._let_go(block, table.floor)

    def _let_go(self, block: Block, floor: int) -> None:
        """Takes ``block`` from a request of that ``floor``, or a slot that it alone has, whose floor is its own."""
        holders, block.holders = block.holders, ()
        if len(holders) > 1:
            place = bisect_left(holders, floor)
            block.holders = holders[:place] + holders[place + 1 :]
        self.num_entries[block.rung] -= 1
        self._lift_floor(block)
        self.store.drop(block)

    def _lift_floor(self, block: Block) -> None:
        """Lets ``block``, released by a request, go as far down as its remaining holders allow."""
        floor = block.holders[0] if block.holders else len(self.spec.rungs) - 1
        if floor != block.floor:
            block.floor = floor
            self.floor_epoch += bool(block.holders)

    # ---- stepping down

    def unsettled(self, request_id: str, num_computed: int) -> Iterator[tuple[Block, int]]:
        """Blocks of a request that may still step down, and how many tokens older than the recent window each is.

        A negative age means that the block is too new (or not full) and must stay as it is. Its states come last; each
        is of all tokens from the first on.
        """
        table, newest = self._look_at(request_id, num_computed)
        for index in range(table.count_settled(self.floor_epoch), len(table.blocks)):
            if not table.blocks[index].is_settled:
                yield table.blocks[index], newest - (index + 1) * self.spec.block_tokens
        for state in self._states(table)[table.num_settled_states :] if self._may_step_down(table) else ():
            if not state.is_settled:
                yield state, num_computed

    def _may_step_down(self, table: BlockTable) -> bool:
        """Whether states of a request may step down now, or will when it has some."""
        if not self.spec.state_floors:
            return False
        states = self._states(table)
        while table.num_settled_states < len(states) and states[table.num_settled_states].is_settled:
            table.num_settled_states += 1
        return table.num_settled_states < self.spec.num_states

    def coldest(self, request_id: str, num_computed: int) -> tuple[Block, int] | None:
        """The first of the widest eligible blocks that only this request holds, and its age in tokens."""
        table, newest = self._look_at(request_id, num_computed)
        first, found = table.count_settled(self.floor_epoch), None
        for number, block in enumerate(table.blocks[first : max(0, newest // self.spec.block_tokens)], first + 1):
            if block.rung < (block.floor if found is None else found[0].rung) and len(block.holders) == 1:
                found = block, newest - number * self.spec.block_tokens
                if not block.rung:
                    break
        return found

    def _look_at(self, request_id: str, num_computed: int) -> tuple[BlockTable, int]:
        """The table of a request, and the tokens of its ``blocks`` that are older than the recent window.

        Tells the request's bank how much can be mined.
        """
        table, spec = self._tables[request_id], self.spec
        if table.bank is not None:
            table.bank.num_computed_tokens = spec.in_blocks(num_computed)
        return table, spec.newest(num_computed) - table.first * spec.block_tokens

    def next_demotable_at(self, request_id: str) -> int:
        """Count of computed tokens from which on ``unsettled`` gives a block that is old enough to step down.

        Rises as blocks are settled; falls only when a floor is lifted, which ``floor_epoch`` counts.
        """
        table, spec = self._tables[request_id], self.spec
        if self._may_step_down(table):
            return 0
        number = table.first + table.count_settled(self.floor_epoch) + 1
        return spec.recent.least_computed(spec.tokens_in(number))

    # ---- counts, kept by the store

    def number(self) -> int:
        """A number for a new block."""
        if self._spare_numbers:
            return self._spare_numbers.pop()
        self._num_numbers += 1
        return self._num_numbers - 1

    def made(self, block: Block) -> None:
        """Counts a new block."""
        self.num_blocks[block.rung] += 1
        self.num_entries[block.rung] += len(block.holders)
        self.note(block)

    def freed(self, block: Block) -> None:
        """Counts a block out that has no owner any more."""
        self.num_blocks[block.rung] -= 1
        self._spare_numbers.append(block.number)

    def stepped_down(self, block: Block, old: int) -> None:
        """Counts a block that stood on the rung ``old``."""
        self.num_blocks[old] -= 1
        self.num_blocks[block.rung] += 1
        self.num_entries[old] -= len(block.holders)
        self.num_entries[block.rung] += len(block.holders)
        self.note(block)

    def note(self, block: Block) -> None:
        """Notes a block that is new or has moved."""
        if self.journal is not None:
            self.journal.blocks.append(block)

    def check_integrity(self, blocks: Sequence[Block]) -> None:
        """Raises ``ArenaError`` unless the tables agree with all live ``blocks`` of the group."""
        held: Counter[Block] = Counter(block for table in self._tables.values() for block in table)
        for block in blocks:
            if block.slot.nbytes != self.sizes[block.rung]:
                raise ArenaError(f"block on rung {block.rung} does not own its slot")
            if block.refs < max(1, held[block]) or len(block.holders) != held[block] or block.rung > block.floor:
                raise ArenaError(f"block with {block.refs} references and floor {block.floor} on rung {block.rung}")
        if not held.keys() <= set(blocks):
            raise ArenaError("a table holds a dead block")
        if +self.num_blocks != Counter(block.rung for block in blocks):
            raise ArenaError("blocks by rung are miscounted")
        if +self.num_entries != +Counter(block.rung for table in self._tables.values() for block in table):
            raise ArenaError("entries by rung are miscounted")
        if {block.number for block in blocks} & set(self._spare_numbers):
            raise ArenaError("a live block's number is spare")
