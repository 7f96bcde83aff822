"""Cached blocks that no request holds, in the order in which they make room. No torch.

They are the coldest blocks of all. They step down first, rung by rung to their group's last one, and are given up when
none can step down any more. The age of an idle block counts from when its last request let it go.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from .block import Block
from .hints import DONE, PLAIN, Hints
from .shares import TenantShares
from .spec import KVSpec


@dataclass(slots=True, eq=False)
class Entry:
    """Cached blocks of the same tokens, which follow those of ``parent``; by group, None for one that is not cached.

    ``since``: serial numbers of when each block fell idle last; they mean nothing while it is in use. ``tenant``: of
    the request that filed the first of them.
    """

    key: bytes
    blocks: list[Block | None]
    tokens: array[int]
    parent: bytes
    since: list[int]
    tenant: str = ""


class Exit(NamedTuple):
    """What can be given up: an ``entry`` as a whole, or its block in the group of the index ``part`` alone.

    ``order``: the rank of its hints, and whether cached blocks follow, which would be lost. ``since``: as of its block.
    ``is_over``: its tenant is over his share.
    """

    entry: Entry
    part: int | None
    order: tuple[int, bool]
    since: int
    is_over: bool


class IdleBlocks:
    """The blocks of a prefix cache that the cache alone owns, by rung and age.

    ``entries`` and ``children``, the numbers of entries that follow, by key; ``cached``: the entry of each block;
    ``hints``: of how long they are of use. All four are the cache's own. ``shares``: of tenants in idle bytes; while
    somebody is over his, nobody else's blocks make room.
    """

    def __init__(
        self,
        spec: KVSpec,
        entries: Mapping[bytes, Entry],
        children: Mapping[bytes, int],
        cached: Mapping[Block, Entry],
        hints: Hints,
        shares: TenantShares,
    ):
        self._hints, self._spec, self._shares = hints, spec, shares
        self._entries, self._children, self._cached = entries, children, cached
        self._full = spec.full
        self._has_parts = len(spec.groups) > 1
        self._counted: dict[bytes, list[tuple[int, int]]] = {}  # kinds of blocks of an entry that can be given up
        self._kinds: Counter[tuple[int, int]] = Counter()  # of all of them
        self.serials = count()
        # Heaps by tenant, some of whose items are out of date: blocks that can step down as (rung, since, block), and
        # what can be given up as (rank of the hints, whether cached blocks follow, since, group, key).
        self._steps: dict[str, list[tuple[int, int, Block]]] = {}
        self._exits: dict[str, list[tuple[int, bool, int, int, bytes]]] = {}
        self._settled: OrderedDict[Block, None] | None = None  # that can step down no more, if anybody asks

    @property
    def nbytes(self) -> int:
        """Bytes of all idle blocks."""
        return sum(block.slot.nbytes for block in self._cached if block.refs == 1)

    def kinds(self) -> Counter[tuple[int, int]]:
        """Numbers by group and rung of the blocks that can be given up."""
        return self._kinds.copy()

    def count(self, entry: Entry) -> None:
        """Counts anew what can be given up of ``entry``, whose blocks changed, and files what can go alone now."""
        found = [(block.group, block.rung) for block in entry.blocks if block is not None and block.refs == 1]
        if found != self._counted.get(entry.key, []):
            self.uncount(entry)
            if found:
                self._counted[entry.key] = found
                self._count_kinds(entry.tenant, found, 1)
        if len(self._full) > 1 and not self._is_whole(entry):
            for index in self._full:
                self.file_exit(entry, index)

    def uncount(self, entry: Entry) -> None:
        """Counts out what could be given up of ``entry``."""
        counted = self._counted.pop(entry.key, None)
        if counted is not None:
            self._count_kinds(entry.tenant, counted, -1)

    def _count_kinds(self, tenant: str, kinds: Iterable[tuple[int, int]], sign: int) -> None:
        """Counts blocks of a tenant in, or out if ``sign`` is -1."""
        for kind in kinds:
            number = self._kinds.get(kind, 0) + sign
            if number:
                self._kinds[kind] = number
            else:
                del self._kinds[kind]
        if self._shares.is_kept:
            nbytes = sum(self._spec.groups[group].nbytes(rung) for group, rung in kinds)
            self._shares.add(tenant, sign * nbytes)

    def recount(self, block: Block) -> None:
        """``count`` for the entry of ``block``, if it is cached."""
        entry = self._cached.get(block)
        if entry is not None:
            self.count(entry)

    def coldest(self, number: int) -> list[tuple[int, int, Block]]:
        """The first ``number`` blocks to step down, each with its rung and when it fell idle.

        The widest come first, and of equal ones the least recently used.
        """
        found = [item for tenant in self._in_turn(self._steps) for item in self._coldest_of(tenant, number)]
        return sorted(found)[:number]

    def _coldest_of(self, tenant: str, number: int) -> list[tuple[int, int, Block]]:
        found, steps = list[tuple[int, int, Block]](), self._steps[tenant]
        while steps and len(found) < number:
            rung, since, block = item = heappop(steps)
            if block.rung > rung:  # it stepped down
                self._file_step(block, since)
            elif self._is_idle_since(block, since):
                found.append(item)
        for item in found:
            heappush(steps, item)
        if not steps:
            del self._steps[tenant]
        return found

    def _in_turn(self, heaps: Collection[str]) -> list[str]:
        """Whose blocks make room now: those of tenants over their share, or else everybody's."""
        return [tenant for tenant in self._shares.over or heaps if tenant in heaps]

    def next_exit(self) -> Exit | None:
        """What is given up next, the least recently used.

        Entries that no cached one follows come first: a request may hold the successor of the others, computed beside
        them and filed after them.
        """
        found = (self._next_exit_of(tenant) for tenant in self._in_turn(self._exits))
        return min((each for each in found if each is not None), key=lambda e: (*e.order, e.since), default=None)

    def _next_exit_of(self, tenant: str) -> Exit | None:
        exits = self._exits[tenant]
        while exits:
            rank, is_inner, since, index, key = exits[0]
            entry = self._entries.get(key)
            if entry is not None and entry.since[index] == since and self._is_filed(entry, index):
                order = self._order(entry, index)
                if order == (rank, is_inner):
                    is_whole = index in self._full and self._is_whole(entry)
                    return Exit(entry, None if is_whole else index, order, since, self._is_over(entry))
                if order > (rank, is_inner):
                    heappush(exits, (*order, since, index, key))
            heappop(exits)
        del self._exits[tenant]
        return None

    def _is_over(self, entry: Entry) -> bool:
        return entry.tenant in self._shares.over

    def fell_idle(self, block: Block) -> None:
        """Files ``block``, which has one owner left, if that is the cache."""
        entry = self._cached.get(block)
        if entry is None:
            return
        self._hints.used(entry.key)
        since = entry.since[block.group] = next(self.serials)
        self.count(entry)
        self._file_step(block, since)
        self.file_settled([block])
        self.file_exit(entry, block.group)

    def file_exit(self, entry: Entry, index: int) -> None:
        """Files what can be given up with the idle block of ``entry`` in a group, if anything can."""
        if not self._can_go(entry, index):
            return
        index = self._place(entry, index)
        exits = self._exits.setdefault(self._heap_of(entry), [])
        heappush(exits, (*self._order(entry, index), entry.since[index], index, entry.key))
        if len(exits) > self._most_items:
            exits[:] = {item for item in exits if self._is_current(*item[2:])}
            heapify(exits)

    def watch_settled(self) -> None:
        """Has ``next_settled`` tell of the blocks that fall idle from here on."""
        self._settled = OrderedDict()

    def file_settled(self, blocks: Iterable[Block]) -> None:
        """Files those of ``blocks``, which fell idle or stepped down, that are idle and can step down no more."""
        if self._settled is None:
            return
        for block in blocks:
            if self._is_settled(block):
                self._settled[block] = None
                self._settled.move_to_end(block)

    def next_settled(self) -> Block | None:
        """The block that has been idle and able to step down no more for longest, until ``pass_settled``."""
        while self._settled:
            block = next(iter(self._settled))
            if self._is_settled(block):
                return block
            self.pass_settled()
        return None

    def pass_settled(self) -> None:
        """Goes on from the block of ``next_settled`` to the one after it, until it falls idle again."""
        assert self._settled is not None
        self._settled.popitem(last=False)

    def _is_settled(self, block: Block) -> bool:
        return block in self._cached and block.refs == 1 and not 0 <= block.rung < block.floor

    def clear(self) -> None:
        """Forgets all blocks."""
        self._counted.clear()
        self._shares.clear()
        self._kinds.clear()
        self._steps.clear()
        self._exits.clear()
        if self._settled is not None:
            self._settled.clear()

    def _file_step(self, block: Block, since: int) -> None:
        if not self._is_idle_since(block, since):
            return
        steps = self._steps.setdefault(self._heap_of(self._cached[block]), [])
        heappush(steps, (block.rung, since, block))
        if len(steps) > self._most_items:
            steps[:] = [(b.rung, since, b) for _, since, b in steps if self._is_idle_since(b, since)]
            heapify(steps)

    def _heap_of(self, entry: Entry) -> str:
        return entry.tenant if self._shares.is_kept else ""

    @property
    def _most_items(self) -> int:
        """Items of a heap above which most are out of date."""
        return 2 * len(self._cached) + 64

    def _is_idle_since(self, block: Block, since: int) -> bool:
        """Whether ``block`` can step down, and has been idle since then."""
        entry = self._cached.get(block)
        idle = entry is not None and block.refs == 1 and entry.since[block.group] == since
        return idle and 0 <= block.rung < block.floor

    def _is_current(self, since: int, index: int, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.since[index] == since and self._is_filed(entry, index)

    def _order(self, entry: Entry, index: int) -> tuple[int, bool]:
        """What comes before age when room is made. A piece that is done is no sooner given up than what follows it."""
        rank, is_inner = self._hints.rank(entry.key), self._is_inner(entry, index)
        return PLAIN if rank == DONE and is_inner else rank, is_inner

    def _is_inner(self, entry: Entry, index: int) -> bool:
        """Whether cached blocks follow, which would be lost, too."""
        return index in self._full and entry.key in self._children

    def _can_go(self, entry: Entry, index: int) -> bool:
        """Whether the block of a group can be given up: no request holds it."""
        block = entry.blocks[index]
        return block is not None and block.refs == 1

    def _is_whole(self, entry: Entry) -> bool:
        """Whether an entry goes as a whole: no request holds a block of it in a group that sees all tokens."""
        return all((block := entry.blocks[index]) is None or block.refs == 1 for index in self._full)

    def _place(self, entry: Entry, index: int) -> int:
        """The group by whose block's age the block of a group goes: its own, or the first of those that go together."""
        if not self._has_parts or index not in self._full or not self._is_whole(entry):
            return index
        return next(group for group in self._full if entry.blocks[group] is not None)

    def _is_filed(self, entry: Entry, index: int) -> bool:
        """Whether what can be given up is filed under that group now."""
        return self._can_go(entry, index) and self._place(entry, index) == index
