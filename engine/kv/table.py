"""Block tables of all groups, and the room that is left: the scheduler's view of memory. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from .arena import Arena, ArenaError
from .block import Block, BlockTable
from .group import GroupTables
from .reserve import reserve_nbytes
from .spec import KVSpec
from .store import BlockStore


class BlockTables:
    """Gives requests blocks of the arena in all groups or in none, lets blocks step down, takes them back."""

    def __init__(self, arena: Arena, spec: KVSpec):
        self.arena, self.spec = arena, spec
        self.store = BlockStore(arena)
        self.groups = self.store.groups = tuple(
            GroupTables(self.store, index, group) for index, group in enumerate(spec.groups)
        )
        self.main = self.groups[spec.groups.index(spec.main)]
        self._dense = Counter(group.widest.nbytes for group in spec.groups)  # slots by size for a block in each group
        self._floors: dict[str, int] = {}  # of requests with tables, as rungs of the ladder
        self._num_tables: Counter[int] = Counter()  # by floor
        self._reserves: dict[frozenset[int], int] = {}  # by the floors in use
        self._least_reserve = arena.reserve_nbytes

    def __contains__(self, request_id: str) -> bool:
        return all(request_id in group for group in self.groups)

    def __len__(self) -> int:
        return len(self._floors)

    def of(self, request_id: str) -> list[BlockTable]:
        """The tables of a request, by group."""
        return [group[request_id] for group in self.groups]

    def blocks(self, request_id: str) -> Iterator[Block]:
        """The slots and blocks of a request, group by group."""
        return chain.from_iterable(self.of(request_id))

    # ---- what fits

    def demand(self, num_tokens: int, rung: int) -> Counter[int]:
        """Slots by size of a request of ``num_tokens`` whose blocks stand on ``rung`` as far as they may."""
        demand: Counter[int] = Counter()
        for group, tables in zip(self.spec.groups, self.groups, strict=True):
            dense, narrow = group.split(num_tokens, group.floors[rung])
            demand[tables.sizes[0]] += dense
            demand[tables.sizes[group.floors[rung]]] += narrow
            demand.update(group.slot_sizes(rung))
        return demand

    def fits(self, demand: Mapping[int, int], share: float = 1.0) -> bool:
        """Whether ``share`` of the arena holds ``demand`` when nothing else is in it."""
        return self.arena.packed_nbytes(demand) <= share * (self.arena.goal_nbytes - self.arena.reserve_nbytes)

    def fits_whatever_stepped_down(self, demand: Mapping[int, int], floors: Iterable[int]) -> bool:
        """``fits``, also while some of the blocks counted dense have stepped down to ``floors`` already.

        Such blocks may begin a slab that is larger than what they leave. Dense blocks in slabs may leave nothing.
        """
        arena, floors = self.arena, frozenset(floors)
        nbytes = arena.packed_nbytes(demand)
        for group in self.groups:
            dense = group.sizes[0]
            for size in {group.sizes[rung] for floor in floors if (rung := group.spec.floors[floor])}:
                early = 1 + -demand.get(size, 0) % arena.per_slab(size)  # blocks that begin a slab: later ones fill it
                if early <= demand.get(dense, 0):
                    nbytes += max(0, arena.slab_nbytes - early * dense * (dense == arena.block_nbytes))
        return nbytes <= arena.goal_nbytes - self._reserve_for(floors)

    def _reserve_for(self, floors: Collection[int]) -> int:
        """Bytes to keep for demotions while requests with ``floors``, each named once, hold blocks."""
        key = frozenset(floors)
        if key not in self._reserves:
            used = [len({chain.floors[floor] for floor in key} - {0}) for chain in self.spec.chains]
            sizes = [chain.sizes for chain in self.spec.chains]
            most = reserve_nbytes(sizes, self.arena.block_nbytes, self.arena.slab_nbytes, used) if max(used) > 1 else 0
            self._reserves[key] = max(self._least_reserve, most)
        return self._reserves[key]

    def max_tokens(self, rung: int, share: float = 1.0, *, context: int | None = None) -> int:
        """Tokens of the longest request that fits alone on ``rung`` in ``share`` of the arena.

        Groups that all have windows hold requests of any length: of the model's ``context``, if it is given.
        """
        most = self.arena.nbytes * self.spec.block_tokens
        if context is not None and self.spec.main.visible is not None:
            most = context
        return _largest(most, lambda number: self.fits(self.demand(number, rung), share))

    def max_requests(self, num_tokens: int, rung: int) -> int:
        """Requests of ``num_tokens`` that fit together on ``rung``."""
        one = self.demand(num_tokens, rung)
        most = self.arena.nbytes // min(size for size, number in one.items() if number)
        return _largest(most, lambda times: self.fits({size: times * number for size, number in one.items()}))

    def has_blocks(self, number: int) -> bool:
        """Whether there is room for ``number`` dense blocks in each group."""
        return not number or self.arena.has_room(self.dense(number))

    def dense(self, number: int) -> dict[int, int]:
        """Slots by size of ``number`` dense blocks in each group."""
        return {nbytes: number * times for nbytes, times in self._dense.items()}

    def free_blocks(self) -> int:
        """The most dense blocks that there is room for in each group."""
        if len(self._dense) == 1:
            return self.arena.room(self.arena.block_nbytes) // len(self.groups)
        return _largest(self.arena.nbytes // self._dense.total(), self.has_blocks)

    # ---- blocks of a request

    def open(
        self,
        request_id: str,
        floor: int,
        shared: Iterable[Block] = (),
        *,
        num_shared_tokens: int = 0,
        num_prompt_tokens: int = 0,
    ) -> None:
        """Begins the tables of a request, on ``shared`` blocks, those of each group in token order.

        These hold its first ``num_shared_tokens``, which only windows have to know. Patterns are mined from the first
        ``num_prompt_tokens`` tokens, even if later ones are known already.
        """
        shared = list(shared)
        self._floors[request_id] = floor
        for group in self.groups:
            own = [block for block in shared if block.group == group.index] if shared else shared
            group.open(request_id, floor, own, num_shared_tokens, num_prompt_tokens)
        self._count_tables(floor, 1)

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Gives a request room for its first ``num_tokens`` tokens; ``False``, and no change, if memory lacks it."""
        number = self._missing(request_id, num_tokens)
        wanted = self._wanted(request_id, number)
        if not wanted:
            return True
        if not self.arena.has_room(wanted):
            return False
        for group in self.groups:
            group.add_blocks(request_id, number)
        return True

    def begin_narrower(self, request_id: str) -> bool:
        """Has the states of a request that has none yet begin a rung lower; ``False`` if it allows none."""
        return any(group.begin_narrower(request_id) for group in self.groups if group.spec.state_floors)

    def held(self, request_id: str) -> int:
        """Tokens that a request's blocks have room for, which are equally many in each group."""
        return self.main.held(request_id)

    def _missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks that the first ``num_tokens`` tokens of a request lack in each group."""
        table = self.main[request_id]
        return max(0, self.spec.main.blocks_for(num_tokens) - table.first - len(table.blocks))

    def _wanted(self, request_id: str, number: int) -> dict[int, int]:
        """Slots by size of ``number`` blocks in each group, and of the slots that a request lacks."""
        wanted = self.dense(number) if number else {}
        for group in self.groups:
            for rung in group.missing_slots(request_id):
                size = group.sizes[rung]
                wanted[size] = wanted.get(size, 0) + 1  # beside blocks of the same size
        return wanted

    def wanted(self, request_id: str, num_tokens: int, spare: int = 0) -> dict[int, int]:
        """Slots by size that the first ``num_tokens`` tokens of a request lack, and ``spare`` blocks beside its own."""
        missing = self._missing(request_id, num_tokens)
        return self._wanted(request_id, missing and missing + spare)

    def room_for(self, request_id: str, num_tokens: int, spare: int = 0) -> int:
        """How many of the first ``num_tokens`` tokens could be reserved now with ``spare`` blocks left over."""
        missing = self._missing(request_id, num_tokens)
        wanted = self._wanted(request_id, missing and missing + spare)
        if not wanted or self.arena.has_room(wanted):
            return num_tokens
        slots = self._wanted(request_id, 0)
        if slots and not self.arena.has_room(slots):
            return 0
        number = _largest(missing, lambda number: self.arena.has_room(self._wanted(request_id, number + spare)))
        table, spec = self.main[request_id], self.spec.main
        return min(num_tokens, spec.tokens_in(table.first + len(table.blocks) + number))

    def trim(self, request_id: str, num_computed: int) -> int:
        """Gives back the blocks of a request that no token from ``num_computed`` on sees.

        Returns the count of computed tokens at which it has more to give back.
        """
        for group in self.groups:
            if group.spec.visible is not None:
                group.trim(request_id, num_computed)
        return self.next_passed_at(request_id)

    def next_passed_at(self, request_id: str) -> int:
        """Count of computed tokens at which ``trim`` gives something back."""
        return min(group.next_passed_at(request_id) for group in self.groups)

    def release(self, request_id: str) -> None:
        """Takes all blocks of a request back; nothing happens if it has none."""
        floor = self._floors.pop(request_id, None)
        if floor is not None:
            self._count_tables(floor, -1)
            for group in self.groups:
                group.release(request_id)

    def _count_tables(self, floor: int, number: int) -> None:
        had = self._num_tables[floor]
        self._num_tables[floor] = had + number
        if not had or had + number == 0:
            self.arena.reserve_nbytes = self._reserve_for(+self._num_tables)

    # ---- other sizes

    def renewed(self, nbytes: int | None = None) -> BlockTables:
        """Empty tables over the same memory, of which at most ``nbytes`` are held; None: as much as was asked for."""
        arena = self.arena.renewed(self.arena.asked_nbytes if nbytes is None else nbytes, self._least_reserve)
        tables = BlockTables(arena, self.spec)
        if arena.hole.number:
            tables.store.note_hole(always=True)
        return tables

    # ---- stepping down

    def unsettled(self, request_id: str, num_computed: int) -> Iterator[tuple[Block, int]]:
        """Blocks of a request that may still step down, group by group, and how much older than recent ones they are.

        In tokens; a negative age means that the block is too new (or not full) and must stay as it is.
        """
        return chain.from_iterable(group.unsettled(request_id, num_computed) for group in self.groups)

    def coldest(self, request_id: str, num_computed: int) -> tuple[Block, int] | None:
        """The oldest of the widest eligible blocks that only this request holds, and its age in tokens."""
        found = [each for group in self.groups if (each := group.coldest(request_id, num_computed)) is not None]
        return min(found, key=lambda each: (each[0].rung, -each[1]), default=None)

    def next_demotable_at(self, request_id: str) -> int:
        """Count of computed tokens from which on ``unsettled`` gives a block that is old enough to step down.

        Rises as blocks are settled; falls only when a floor is lifted, which ``floor_epoch`` counts.
        """
        return min(group.next_demotable_at(request_id) for group in self.groups)

    @property
    def floor_epoch(self) -> int:
        """Lifts of floors in all groups."""
        return sum(group.floor_epoch for group in self.groups)

    def demote(self, steps: Iterable[tuple[Block, int]]) -> int:
        """Lets each block step down to its rung, or the next one with a slot; returns how many did."""
        return self.store.demote(steps)

    def check_integrity(self) -> None:
        """Raises ``ArenaError`` unless tables, blocks and arena agree."""
        self.store.check_integrity()
        for request_id in self._floors:
            if len({group.held(request_id) for group in self.groups}) != 1:
                raise ArenaError(f"groups hold other tokens of {request_id}")


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``most`` that ``fits``, as all below it do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
