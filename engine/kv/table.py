"""Block tables: the blocks of each request, their rungs, and the room that is left. No torch.

Books only: changes of bytes are noted as waves of moves, which the cache carries out before the next step. Within a
wave no slot is both read and written, except banks, which are mined before anything is moved; a slot that a wave frees
may be written by the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from .arena import Arena, ArenaError, Slot
from .bank import Bank
from .block import Block, BlockTable, Journal, Move, slot_rung
from .spec import KVSpec, RequestSlot


def reserve_nbytes(rungs: Sequence[int], slab_nbytes: int, num_floors: int = 1) -> int:
    """Bytes to keep for demotions, so that blocks always reach their floors.

    ``rungs``: bytes of a block on each rung, widest first. ``num_floors``: distinct floors below the first rung. A
    slab, and for each floor what a slab that is begun may leave free. The proof is in docs/kv_cache.md.
    """
    narrower = rungs[1:]
    if not narrower:
        return 0
    begun = narrower[:-1] if num_floors == 1 else narrower
    left = sorted((slab_nbytes - slab_nbytes // (slab_nbytes // size) for size in begun), reverse=True)
    return slab_nbytes + sum(left[: min(num_floors, len(narrower) - 1)])


class BlockTables:
    """Gives requests blocks of the arena, lets blocks step down, takes them back. The scheduler's view of memory."""

    def __init__(self, arena: Arena, spec: KVSpec):
        self.arena, self.spec, self.group = arena, spec, spec.group
        self.waves: list[list[Move]] = []
        self.num_blocks: Counter[int] = Counter()  # live blocks by rung
        self.num_entries: Counter[int] = Counter()  # the same, each block once for every request that holds it
        self.journal: Journal | None = None  # changes, for the keeper of a copy of the tables
        self.on_lone: Callable[[Block], None] | None = None  # called with each block left with one owner
        self.num_demotions: Counter[tuple[str, str]] = Counter()
        self.floor_epoch = 0  # lifts of floors, each of which may unsettle settled blocks
        self._tables: dict[str, BlockTable] = {}
        self._num_tables: Counter[int] = Counter()  # by floor
        self._least_reserve = arena.reserve_nbytes
        self._owner: dict[Slot, Block] = {}
        self._fresh: dict[Slot, None] = {}
        self._retiring: list[Slot] = []  # old slots of the wave in progress
        self._spare_numbers: list[int] = []
        self.sizes = {number: rung.nbytes for number, rung in enumerate(self.group.rungs)}
        self.sizes |= {slot_rung(index): slot.nbytes for index, slot in enumerate(self.group.slots)}

    def __getitem__(self, request_id: str) -> BlockTable:
        return self._tables[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    # ---- what fits

    def demand(self, num_tokens: int, rung: int) -> Counter[int]:
        """Slots by size of a request of ``num_tokens`` whose blocks stand on ``rung`` as far as they may."""
        dense, narrow = self.split(num_tokens, rung)
        demand = Counter({self.sizes[0]: dense})
        demand[self.sizes[rung]] += narrow
        demand.update(slot.nbytes for slot in self.group.slots)
        return demand

    def split(self, num_tokens: int, rung: int) -> tuple[int, int]:
        """Blocks of a request of ``num_tokens`` that stay dense, and those that may stand on ``rung``.

        Counted when its last block begins, which is when most are dense; neither number falls as a request grows.
        """
        blocks = self.group.blocks_for(num_tokens)
        older = self._newest(self.group.tokens_in(blocks - 1))
        narrow = max(0, older // self.group.block_tokens) if rung else 0
        return blocks - narrow, narrow

    def fits(self, demand: Mapping[int, int], share: float = 1.0) -> bool:
        """Whether ``share`` of the arena holds ``demand`` when nothing else is in it."""
        return self.arena.packed_nbytes(demand) <= share * (self.arena.nbytes - self.arena.reserve_nbytes)

    def fits_whatever_stepped_down(self, demand: Mapping[int, int], floors: Iterable[int]) -> bool:
        """``fits``, also while some of the blocks counted dense have stepped down to ``floors`` already.

        Such blocks may begin a slab that is larger than what they leave.
        """
        arena, floors = self.arena, set(floors)
        nbytes, dense = arena.packed_nbytes(demand), demand.get(self.sizes[0], 0)
        for size in {self.sizes[rung] for rung in floors if rung}:
            early = 1 + -demand.get(size, 0) % arena.per_slab(size)  # blocks that begin a slab: later ones fill it
            if early <= dense:
                nbytes += max(0, arena.slab_nbytes - early * self.sizes[0])
        return nbytes <= arena.nbytes - self._reserve_for(floors)

    def _reserve_for(self, floors: Collection[int]) -> int:
        """Bytes to keep for demotions while requests with ``floors``, each named once, hold blocks."""
        num_floors = sum(floor > 0 for floor in floors)
        if num_floors < 2:
            return self._least_reserve
        rungs = [rung.nbytes for rung in self.group.rungs]
        return max(self._least_reserve, reserve_nbytes(rungs, self.arena.slab_nbytes, num_floors))

    def max_tokens(self, rung: int, share: float = 1.0) -> int:
        """Tokens of the longest request that fits alone on ``rung`` in ``share`` of the arena."""
        return _largest(
            self.arena.nbytes * self.group.block_tokens, lambda number: self.fits(self.demand(number, rung), share)
        )

    def max_requests(self, num_tokens: int, rung: int) -> int:
        """Requests of ``num_tokens`` that fit together on ``rung``."""
        one = self.demand(num_tokens, rung)
        most = self.arena.nbytes // min(size for size, number in one.items() if number)
        return _largest(most, lambda times: self.fits({size: times * number for size, number in one.items()}))

    @property
    def max_blocks(self) -> int:
        """The most live blocks there can be; every block number is smaller."""
        return self.arena.nbytes // min(self.sizes.values())

    def live_blocks(self) -> list[Block]:
        """Every block that owns a slot."""
        return list(self._owner.values())

    # ---- blocks of a request

    def open(self, request_id: str, floor: int, shared: Iterable[Block] = (), *, num_prompt_tokens: int = 0) -> None:
        """Begins the table of a request, on ``shared`` blocks in token order.

        Patterns are mined from the first ``num_prompt_tokens`` tokens, even if later ones are known already.
        """
        table = self._tables[request_id] = BlockTable(floor, num_prompt_tokens)
        self._count_table(floor, 1)
        if self.journal is not None:
            self.journal.opened = True
        for block in shared:
            block.refs += 1
            insort(block.holders, floor)
            self.num_entries[block.rung] += 1
            block.floor = block.holders[0]
            (table.slots if block.rung < 0 else table.blocks).append(block)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Gives a request room for its first ``num_tokens`` tokens; ``False``, and no change, if memory lacks it."""
        table = self._tables[request_id]
        missing = max(0, self.group.blocks_for(num_tokens) - len(table.blocks))
        slots = self.group.slots[len(table.slots) :]
        if not missing and not slots:
            return True
        if not self._has_room(missing, slots):
            return False
        for index in range(len(table.slots), len(self.group.slots)):
            table.slots.append(self._new_block(slot_rung(index), table.floor))
        if self.group.has_bank and table.bank is None:
            in_blocks = self.group.in_blocks(table.num_prompt_tokens)
            table.bank = Bank(table.slots[-1], table.blocks, in_blocks, self.group.block_tokens, self.group.num_windows)
        for _ in range(missing):
            table.blocks.append(self._new_block(0, table.floor, table.bank))
        if self.journal is not None:
            self.journal.grown.append(request_id)
        return True

    def held(self, request_id: str) -> int:
        """Tokens that a request's blocks have room for."""
        table = self._tables[request_id]
        return self.group.tokens_in(len(table.blocks)) if table.slots or table.blocks else 0

    def entries(self, table: BlockTable) -> list[Block]:
        """The blocks of a request that hold tokens, in token order: its slot comes first."""
        return [*table.slots[: self.group.num_token_slots], *table.blocks]

    def wanted(self, request_id: str, num_tokens: int, spare: int = 0) -> dict[int, int]:
        """Slots by size that the first ``num_tokens`` tokens of a request lack, and ``spare`` blocks beside its own."""
        table = self._tables[request_id]
        missing = max(0, self.group.blocks_for(num_tokens) - len(table.blocks))
        return self._sizes_of(missing and missing + spare, self.group.slots[len(table.slots) :])

    def room_for(self, request_id: str, num_tokens: int, spare: int = 0) -> int:
        """How many of the first ``num_tokens`` tokens could be reserved now with ``spare`` blocks left over."""
        table = self._tables[request_id]
        slots = self.group.slots[len(table.slots) :]
        held = self.group.tokens_in(len(table.blocks))
        if (not slots and num_tokens <= held) or self.arena.has_room(self.wanted(request_id, num_tokens, spare)):
            return num_tokens
        if slots and not self._has_room(0, slots):
            return 0
        room = self.arena.room(self.sizes[0])
        while slots and room and not self._has_room(room, slots):
            room -= 1
        return min(num_tokens, held + max(0, room - spare) * self.group.block_tokens)

    def release(self, request_id: str) -> None:
        """Takes all blocks of a request back; nothing happens if it has none."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        self._count_table(table.floor, -1)
        for block in table:
            del block.holders[bisect_left(block.holders, table.floor)]
            self.num_entries[block.rung] -= 1
            self._lift_floor(block)
            self.drop(block)

    def _count_table(self, floor: int, number: int) -> None:
        self._num_tables[floor] += number
        self.arena.reserve_nbytes = self._reserve_for(+self._num_tables)

    def drop(self, block: Block) -> None:
        """Takes one owner from ``block``; without owners it is freed. Raises ``ArenaError`` for a dead block."""
        if block.refs < 1:
            raise ArenaError("a block was dropped more often than it was shared")
        block.refs -= 1
        if block.refs == 1 and self.on_lone is not None:
            self.on_lone(block)
        if not block.refs:
            self.num_blocks[block.rung] -= 1
            self._spare_numbers.append(block.number)
            self._free(block.slot)

    def take_fresh(self) -> list[Slot]:
        """Slots handed out since the last call and not written yet; they hold an earlier owner's bytes."""
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh

    # ---- stepping down

    def unsettled(self, request_id: str, num_computed: int) -> Iterator[tuple[Block, int]]:
        """Blocks of a request that may still step down, and how many tokens older than the recent window each is.

        A negative age means that the block is too new (or not full) and must stay as it is.
        """
        table, newest = self._look_at(request_id, num_computed)
        for index in range(table.count_settled(self.floor_epoch), len(table.blocks)):
            if not table.blocks[index].is_settled:
                yield table.blocks[index], newest - (index + 1) * self.group.block_tokens

    def coldest(self, request_id: str, num_computed: int) -> tuple[Block, int] | None:
        """The first of the widest eligible blocks that only this request holds, and its age in tokens."""
        table, newest = self._look_at(request_id, num_computed)
        first, found = table.count_settled(self.floor_epoch), None
        for number, block in enumerate(table.blocks[first : max(0, newest // self.group.block_tokens)], first + 1):
            if block.rung < (block.floor if found is None else found[0].rung) and len(block.holders) == 1:
                found = block, newest - number * self.group.block_tokens
                if not block.rung:
                    break
        return found

    def _look_at(self, request_id: str, num_computed: int) -> tuple[BlockTable, int]:
        """The table of a request, and ``_newest``; tells the request's bank how much can be mined."""
        table = self._tables[request_id]
        if table.bank is not None:
            table.bank.num_computed_tokens = self.group.in_blocks(num_computed)
        return table, self._newest(num_computed)

    def _newest(self, num_computed: int) -> int:
        """Tokens in blocks that are older than the recent window."""
        return self.group.in_blocks(self.group.recent.older(num_computed))

    def next_demotable_at(self, request_id: str) -> int:
        """Count of computed tokens from which on ``unsettled`` gives a block that is old enough to step down.

        Rises as blocks are settled; falls only when a floor is lifted, which ``floor_epoch`` counts.
        """
        num_settled = self._tables[request_id].count_settled(self.floor_epoch)
        return self.group.recent.least_computed(self.group.tokens_in(num_settled + 1))

    def next_aging(self, num_computed: int) -> int:
        """Computed tokens, more than ``num_computed``, at which the next block is older than the recent window."""
        aged = max(0, self._newest(num_computed) // self.group.block_tokens)
        return self.group.recent.least_computed(self.group.tokens_in(aged + 1))

    def demote(self, steps: Iterable[tuple[Block, int]]) -> int:
        """Lets each block step down to its rung, in one wave if there is room; returns how many did.

        A block whose rung has no slot goes to the next one that has, at most to its floor, or stays where it is.
        """
        wave, done = list[Move](), 0
        for block, wanted in steps:
            for rung in range(wanted, block.floor + 1):
                slot = self._urgent_slot(self.sizes[rung], wave)
                if slot is not None:
                    break
            else:
                continue
            wave.append(Move.down(block, slot, rung))
            rungs = self.group.rungs
            self.num_demotions[rungs[block.rung].name, rungs[rung].name] += 1
            self.num_blocks[block.rung] -= 1
            self.num_blocks[rung] += 1
            self.num_entries[block.rung] -= len(block.holders)
            self.num_entries[rung] += len(block.holders)
            # The old slot stays allocated until the wave ends, so that nothing in the wave is written over it.
            self._owner.pop(block.slot)
            self._retiring.append(block.slot)
            self._owner[slot] = block
            block.slot, block.rung = slot, rung
            self._note(block)
            done += 1
        self._end_wave(wave)
        return done

    def _urgent_slot(self, nbytes: int, wave: list[Move]) -> Slot | None:
        """A slot for a block that steps down; ends the ``wave`` and gathers free bytes if need be."""
        slot = self.arena.allocate(nbytes, urgent=True)
        if slot is None:
            self._end_wave(wave)
            slot = self.arena.allocate(nbytes, urgent=True)
        while slot is None and self._evacuate():
            slot = self.arena.allocate(nbytes, urgent=True)
        return slot

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless tables, blocks and arena agree."""
        self.arena.check_integrity()
        held: Counter[Block] = Counter(block for table in self._tables.values() for block in table)
        for slot, block in self._owner.items():
            if block.slot is not slot or not slot.alive or slot.nbytes != self.sizes[block.rung]:
                raise ArenaError(f"block on rung {block.rung} does not own its slot")
            if block.refs < max(1, held[block]) or len(block.holders) != held[block] or block.rung > block.floor:
                raise ArenaError(f"block with {block.refs} references and floor {block.floor} on rung {block.rung}")
        if not held.keys() <= set(self._owner.values()):
            raise ArenaError("a table holds a dead block")
        if sum(self.arena.live.values()) != len(self._owner):
            raise ArenaError("a live slot belongs to no block")
        if +self.num_blocks != Counter(block.rung for block in self._owner.values()):
            raise ArenaError("blocks by rung are miscounted")
        if +self.num_entries != +Counter(block.rung for table in self._tables.values() for block in table):
            raise ArenaError("entries by rung are miscounted")
        if {block.number for block in self._owner.values()} & set(self._spare_numbers):
            raise ArenaError("a live block's number is spare")

    def _new_block(self, rung: int, floor: int, bank: Bank | None = None) -> Block:
        size = self.sizes[rung]
        slot = self.arena.allocate(size)
        while slot is None:
            if not self._evacuate():
                raise ArenaError("the arena has less room than it says")
            slot = self.arena.allocate(size)
        # Numbers in use are as many as live blocks: with none spare, the next one is their count.
        number = self._spare_numbers.pop() if self._spare_numbers else len(self._owner)
        block = self._owner[slot] = Block(slot, rung, floor, number, holders=[floor], bank=bank)
        self._fresh[slot] = None
        self.num_blocks[rung] += 1
        self.num_entries[rung] += 1
        self._note(block)
        return block

    def _note(self, block: Block) -> None:
        if self.journal is not None:
            self.journal.blocks.append(block)

    def _has_room(self, blocks: int, slots: Iterable[RequestSlot]) -> bool:
        return self.arena.has_room(self._sizes_of(blocks, slots))

    def _sizes_of(self, blocks: int, slots: Iterable[RequestSlot]) -> dict[int, int]:
        """Slots by size of blocks on the widest rung and ``slots``."""
        sizes = {self.sizes[0]: blocks}
        for slot in slots:
            sizes[slot.nbytes] = sizes.get(slot.nbytes, 0) + 1  # adds to ``blocks`` where a slot has the same size
        return sizes

    def _lift_floor(self, block: Block) -> None:
        """Lets ``block``, released by a request, go as far down as its remaining holders allow."""
        floor = block.holders[0] if block.holders else len(self.group.rungs) - 1
        if floor != block.floor:
            block.floor = floor
            self.floor_epoch += bool(block.holders)

    def _evacuate(self) -> bool:
        """Gathers free bytes of the arena, as a wave of copies; ``False`` if none can be won."""
        moves, wave = self.arena.evacuate(), []
        for old, new in moves:
            block = self._owner.pop(old)
            self._owner[new] = block
            block.slot = new
            self._note(block)
            if old in self._fresh:
                del self._fresh[old]
                self._fresh[new] = None
            else:
                wave.append(Move(block, old.address, new.address, block.rung, block.rung))
            self._retiring.append(old)
        self._end_wave(wave)
        return bool(moves)

    def _end_wave(self, wave: list[Move]) -> None:
        """Notes the moves of ``wave``, empties it, and frees the slots that the moves leave."""
        if wave:
            self.waves.append(wave[:])
            wave.clear()
        for slot in self._retiring:
            self.arena.release(slot)
        self._retiring.clear()

    def _free(self, slot: Slot) -> None:
        del self._owner[slot]
        self._fresh.pop(slot, None)
        self.arena.release(slot)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` that ``fits``, as all below it do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
