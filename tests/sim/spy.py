"""A checker between scheduler and KV memory that compares every call with its own reckoning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from qkv_engine.request import RequestStatus

from .admission import Admission
from .broken import require
from .cached import CHECKPOINT, Cached
from .code import Code
from .hinted import Hinted
from .hosted import Hosted
from .options import OPEN_END_BLOCKS, Options
from .relief import Relief
from .sealing import check_sealing
from .shrinks import check_end, lacks_bytes
from .states import States


class SpySpace(Relief):
    """A ``KVSpace`` that checks calls; other attributes are those of the space behind it."""

    def __init__(self, space: Any, options: Options, code: Code):
        super().__init__(space.tables, options, code.pressure, Cached(space.prefix, options))
        self._space, self.prefix = space, space.prefix
        self._admission = Admission(space.tables, options, OPEN_END_BLOCKS * options.block)
        self.replayed: Counter[tuple[str, str]] = Counter()  # demotions by rung
        self.replayed_idle: Counter[tuple[str, str]] = Counter()  # the same of blocks that nobody holds
        self.mined: set[Any] = set()  # banks that were mined
        self.num_trims = self.num_idle_demotions = 0  # since the simulator looked
        self.size_asked = options.nbytes  # of memory
        self.hosted, self.hinted = Hosted(self, space.prefix), Hinted(self)
        self.states = States(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    # ---- calls

    def begin_step(self, copy_nbytes: int | None) -> None:
        self.hosted.begin_step(copy_nbytes)
        self.hinted.check_expired()

    def write_ahead(self) -> None:
        self.hosted.write_ahead()

    def park(self, request: Any) -> int:
        return self.hosted.park(request)

    def begin_fetching(self, request: Any) -> Any:
        return self.hosted.begin_fetching(request)

    def shortage_to_keep(self, request: Any) -> Any:
        return self.states.shortage_to_keep(request)

    def keep_state(self, request: Any) -> None:
        self.states.keep_state(request)

    def check_relieved(self) -> None:
        """Checks that each waiting request for which blocks stepped down runs now, or waits for its own."""
        started = {*self.scheduler.running, *self.hosted.under_way}
        require(all(r in started for r in self.relieved), "blocks step down for one who is not admitted")

    def admits(self, request: Any) -> bool:
        return self._asked("admits", request)

    def within_quota(self, request: Any) -> bool:
        return self._asked("within_quota", request)

    def _asked(self, question: str, request: Any) -> bool:
        together = [*self.scheduler.running, request]
        found = bool(getattr(self._space, question)(request))
        expected = getattr(self._admission, question)(together, [self.options.floor(r.params) for r in together])
        require(found == expected, f"{question}: {found}, reckoned anew {expected}")
        return found

    def room_for(self, request: Any, num_tokens: int, spare: int = 0) -> int:
        others = [
            r for r in self.scheduler.running if r is not request and r.num_computed_tokens >= self.holdings.held(r)
        ]
        self._end_shrink()
        require(spare == len(others), f"{spare} blocks are spared, {len(others)} requests lack one")
        room = self._space.room_for(request, num_tokens, spare)
        require(0 <= room <= num_tokens, f"room for {room} of {num_tokens} tokens")
        self._ask(request, num_tokens, spare)
        limit = self.memory.limit()

        def fits(tokens: int) -> bool:
            sizes = self.holdings.lacking(request, tokens, spare)
            return not tokens or not sizes or self.memory.packed(sizes) <= limit

        require(fits(room), f"no room for {room} tokens and {spare} spare blocks")
        require(room == num_tokens or not fits(room + 1), f"room for more than {room} tokens")
        self.short = room < num_tokens
        return int(room)

    def reserve(self, request: Any, num_tokens: int) -> bool:
        self._end_shrink()
        tables = self.holdings.tables_of(request)
        had = [len(table.blocks) for table in tables]
        promised = self._space.room_for(request, num_tokens) >= num_tokens
        sizes, new = self.holdings.lacking(request, num_tokens, 0), self.holdings.num_missing(request, num_tokens)
        limit = self.memory.limit()
        fits = not sizes or self.memory.packed(sizes) <= limit
        got = self._space.reserve(request, num_tokens)
        require(got == promised == fits, f"reserved {got}, promised {promised}, packed it fits {fits}")
        found = [len(table.blocks) for table in tables]
        require(found == [number + new * got for number in had], "a reservation is not all or nothing")
        require(not got or not self.holdings.lacking(request, 1, 0), "a request has blocks and lacks a slot")
        if got and new and num_tokens > request.num_computed_tokens + 1:
            others = [r for r in self.scheduler.running if r is not request and self.holdings.lacks_block(r)]
            spare = self.holdings.dense(len(others))
            require(
                self.memory.packed(spare) <= limit, "a chunk takes the blocks that others need for their next token"
            )
        self._ask(request, num_tokens, 0)
        self.short = not got
        return bool(got)

    def begin_narrower(self, request: Any) -> bool:
        return self.states.begin_narrower(request)

    def trim(self, request: Any) -> None:
        tables, groups, computed = self.holdings.tables_of(request), self.options.groups, request.num_computed_tokens
        require(self.holdings.is_due(request), "a request has nothing to give back")
        gone = [
            block
            for group, table in zip(groups, tables, strict=True)
            for block in table
            if block.refs == 1 and self.holdings.end_of(group, table, block) <= group.first_seen(computed)
        ]
        self.num_trims += 1
        used = self.tables.arena.used_nbytes - sum(block.slot.nbytes for block in gone)
        self._space.trim(request)
        require(self.tables.arena.used_nbytes == used, "a block out of sight is kept, or another is given back")
        due = []
        for group, table in zip(groups, tables, strict=True):
            if group.visible is not None:
                has_sink = group.sink and table.num_slots == len(table.slots)
                due.append((group.sink if has_sink else group.end(table.first)) + group.visible - 1)
        require(request.next_passed_at == min(due), f"{request.next_passed_at} tokens until the next block passes")

    def _ask(self, request: Any, num_tokens: int, spare: int) -> None:
        self.needy, missing = request, self.holdings.num_missing(request, num_tokens)
        self.wanted = self.holdings.lacking(request, num_tokens, spare)
        self.asked[request.request_id] = max(self.asked.get(request.request_id, 0), missing + spare + 1)

    def capacity_of(self, params: Any) -> int:
        """Tokens that fit alone for a request with ``params``."""
        return int(self._space.capacities[self.options.floor(params)])

    def shrink(self) -> int:
        self.shrinks = True
        before, places = self.tables.arena.nbytes, self._places()
        lacks = int(self._space.shrink())
        now = self.tables.arena.nbytes
        gathers = lacks > 0 or now == self.tables.arena.goal_nbytes or self._places() != places
        require(gathers, "a shrink that lacks nothing does not go on")
        require(self.tables.arena.goal_nbytes <= now <= before, "memory shrinks past its goal")
        require((lacks > 0) == lacks_bytes(self), f"a shrink lacks {lacks} bytes")
        return lacks

    def _end_shrink(self) -> None:
        """Notes that others ask for room from here on."""
        if self.shrinks:
            check_end(self)
        self.shrinks = False

    def _places(self) -> list[int]:
        """Addresses of all slots."""
        return [block.slot.address for block in self.tables.store.live_blocks()]

    def open(self, request: Any) -> int:
        self._end_shrink()
        num_tokens, expected = self.cached.longest(request)
        self.states.note_start(request)
        found = self._space.open(request)
        require(found == num_tokens, f"{found} tokens are found, {num_tokens} could be")
        self.states.check_start(request, found)
        require(found < request.num_tokens, "nothing is left to compute")
        held = self.holdings.held(request)
        require(found == held, f"{found} tokens found, blocks hold {held}")
        for group, table, blocks in zip(self.options.groups, self.holdings.tables_of(request), expected, strict=True):
            floor = group.floors[self.options.floor(request.params)]
            require(table.floor == floor, f"a table with floor {table.floor} for one who allows {floor}")
            require(list(table) == blocks, f"{len(blocks)} blocks could be shared, or not those that are")
        self._check_told(request, expected)
        if request.params.prompt_logprobs is not None:
            require(found == 0, "prompt log-probabilities need every token computed")
        if request.params.num_prefill_tokens is not None:
            require(found == 0, "a scored request attends to others' blocks")
        return int(found)

    def release(self, request: Any) -> None:
        if request.status is RequestStatus.WAITING:  # it could not start
            self.states.check_narrowest(request)
            self.check_stuck_start(request)
        self.hinted.release(request)

    def check_stuck_start(self, request: Any) -> None:
        """Checks that a request that is about to start would find no room without idle blocks."""
        others = [r for r in self.scheduler.running if self.holdings.lacks_block(r)]
        wanted = self.holdings.lacking(request, self.holdings.held(request) + 1, len(others))
        gone = [self._size_of(kind) for kind in self.cached.kinds().elements()]
        fits = self.memory.packed(wanted, gone) <= self.memory.limit()
        require(not fits, "a request waits although idle blocks are in its way alone")

    def _size_of(self, kind: tuple[int, int]) -> int:
        """Bytes of a block of a group and rung."""
        return self.options.groups[kind[0]].size(kind[1])

    def _check_told(self, request: Any, expected: list[list[Any]]) -> None:
        """Checks the rungs by which a request is told what it found."""
        options, told = self.options, Counter[str]()
        main = next((index for index, group in enumerate(options.groups) if group.visible is None), 0)
        for block in expected[main]:
            name = options.rung_names(main)[max(0, block.rung)]
            told[name] += options.block if block.rung >= 0 else options.sink
        require(request.found_tokens == told, "a request is told other rungs than it found")

    def computed(self, request: Any, num_tokens: int) -> None:
        start = 0 if self.prefix is None else self.prefix._published.get(request.request_id, 0)
        had = set() if self._space.prefix is None else set(self._space.prefix._entries)
        self._space.computed(request, num_tokens)
        if self._space.prefix is not None:
            new = [entry for key, entry in self._space.prefix._entries.items() if key not in had]
            require(all(e.tenant == request.params.tenant for e in new), "a piece counts for who did not compute it")
            self.cached.check_filed(request, self.holdings.tables_of(request), start, num_tokens)

    def evict(self) -> bool:
        idle, had = self.cached.idle(), self.cached.places()
        used, needed = self.tables.arena.used_nbytes, self.short or not self.scheduler.running
        if self.shrinks:
            needed = lacks_bytes(self)
        elif self.needy is None:
            growing = self._num_growing()
            needed = growing > 0 and self.memory.packed(self.holdings.dense(growing)) > self.memory.limit()
        require(needed, "cached blocks are given up without need")
        if self.scheduler.running or self.shrinks:  # a lone request may be in the way of itself
            self._check_stuck("a cached block is given up while one could step down")
            self._note_relieved()
        expected = self.cached.of(min(idle)) if idle else set()
        leaving = {place: had[place] for place in expected if place[1] != CHECKPOINT}
        noted = self.hosted.num_noted()
        clean = self.hosted.watch_out(leaving)
        done = self._space.evict()
        self.hosted.check_out(leaving, clean, noted)
        gone = had.keys() - self.cached.places().keys()
        require(gone == expected, "other cached blocks are given up than the oldest")
        self.states.note_given_up(gone)
        require(done == bool(idle), f"{len(idle)} cached blocks are idle, one was given up: {done}")
        require(not done or self.tables.arena.used_nbytes < used, "giving up a cached block frees nothing")
        return bool(done)

    def idle_kinds(self) -> Any:
        found = self._space.idle_kinds()
        require(found == self.cached.kinds(), "what may be given up is miscounted")
        return found

    def demote(self, steps: Iterable[tuple[Any, int]]) -> int:
        steps = list(steps)
        is_idle = any(not block.holders for block, _ in steps)
        settles = not (is_idle or self.shrinks) and self.needy is None and self._is_settling(steps)
        if is_idle:
            self._check_idle_relief(steps)
        elif not settles:
            self._check_relief(steps)
        require(
            not any(map(self.holdings.is_due, self.scheduler.running)), "blocks step down while others are out of sight"
        )
        used, had = self.tables.arena.used_nbytes, [block.rung for block, _ in steps]
        waves = self.tables.store.waves
        num_waves = len(waves)
        for block, rung in steps:
            require(block.rung < rung <= block.floor, f"rung {block.rung} -> {rung} with floor {block.floor}")
        require(len({id(block) for block, _ in steps}) == len(steps), "a block is named twice")
        done = self._space.demote(steps)
        won = moved = 0
        for (block, rung), old in zip(steps, had, strict=True):
            require(block.rung == old or rung <= block.rung <= block.floor, "a block is not where it was sent")
            if block.rung > old:
                group = block.group
                names = [self.options.rung_name(group, rung) for rung in (old, block.rung)]
                replayed = self.replayed_idle if is_idle else self.replayed
                replayed[names[0], names[1]] += 1
                self.states.note_step(block, is_idle)
                self.num_idle_demotions += is_idle
                won += self._size(block, old) - block.slot.nbytes
                moved += 1
        if any(
            block.rung != rung for block, rung in steps
        ):  # found no slot there: what is won is not what was reckoned
            self.relieved.clear()
        for (block, rung), old in list(zip(steps, had, strict=True))[-1:]:
            self._check_last(block, rung, old)
        if not settles:
            self._note_few(done)
        require(done == moved, f"{moved} blocks stepped down, {done} are counted")
        for wave in waves[num_waves:]:
            for move in wave:
                check_sealing(self, move)
        require(used - self.tables.arena.used_nbytes == won, "other bytes were won than the slots differ by")
        self.demoted += done
        return int(done)

    def _check_last(self, block: Any, wanted: int, old: int) -> None:
        """Checks that the last block of a call found no slot on its rung if it is not there."""
        found = block.rung
        back, gone = ([], []) if found == old else ([self._size(block, old)], [self._size(block, found)])
        fits = self.memory.packed([self._size(block, wanted), *back], gone) <= self.tables.arena.nbytes
        require(found == wanted or not fits, "a block does not find a slot that there is")

    def _size(self, block: Any, rung: int) -> int:
        """Bytes of a block on that rung."""
        return self.options.groups[block.group].size(rung)

    def check_preemption(self) -> None:
        """Checks that nobody gives way while cached blocks are idle or a block that may step down finds a slot."""
        require(not self.cached.idle(), "a request gives way while cached blocks are idle")
        self._check_stuck("a request gives way while a cached block could step down")
        found = self._eligible(self._ranks(self.needy.params.tenant), even_recent=True)
        require(not any(map(self._finds_slot, found)), "a request gives way while a block could step down")

    def check_work(self) -> None:
        """Checks that the demotions in one schedule are bounded by the blocks asked for."""
        groups = self.options.groups
        if all(len(group.sizes) == 1 for group in groups):
            return
        chains = [sizes for group in groups for sizes, _ in group.chains]
        least = min(a - b for sizes in chains for a, b in pairwise(sizes))
        slots = sum(sum(group.slots) for group in groups)
        slab = self.tables.arena.slab_nbytes
        dense = sum(-(-size // slab) * slab if size > slab else size for size in self.holdings.dense(1)) + slots
        running, num_rungs = len(self.scheduler.running), sum(map(len, chains))
        bound = self._most_ahead() + self._pressure.EAGER_PER_STEP * -(-running // 32)
        bound += self._num_urgent() + self.num_shrunk
        for blocks in self.asked.values():
            bound += (blocks * dense + (num_rungs + 2) * slab) // least + 8 * (num_rungs - 1)
        none = any(slab // b * a <= slab for sizes in chains for a, b in pairwise(sizes[:2]))
        if none or any(slab // a == slab // b for sizes in chains for a, b in pairwise(sizes[1:])):
            bound += len(self.tables.store.live_blocks()) * num_rungs  # steps between such sizes win no slab
        require(self.demoted <= bound, f"{self.demoted} blocks stepped down in one step, at most {bound} had to")
