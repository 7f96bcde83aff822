"""A checker between scheduler and KV memory that compares every call with its own reckoning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from qkv_engine.request import RequestStatus

from .admission import Admission
from .broken import require
from .cached import Cached
from .code import Code
from .holdings import Holdings
from .memory import Memory
from .options import OPEN_END_BLOCKS, Options
from .sealing import check_sealing
from .shrinks import check_steps, lacks_bytes


class Eligible(NamedTuple):
    """A block that may step down by the spy's reckoning; sorts in the order of stepping down."""

    rank: int
    shared: bool
    rung: int
    newness: int
    arrival: int
    index: int
    key: int
    floor: int
    group: int


class SpySpace:
    """A ``KVSpace`` that checks calls; other attributes are those of the space behind it."""

    def __init__(self, space: Any, options: Options, code: Code):
        self._space, self.options, self._pressure = space, options, code.pressure
        self.tables, self.prefix = space.tables, space.prefix
        self.memory, self.holdings = Memory(space.tables, options), Holdings(space.tables, options)
        self._admission = Admission(space.tables, options, OPEN_END_BLOCKS * options.block)
        self.cached = Cached(space.prefix, options)
        self.scheduler: Any = None
        self.replayed: Counter[tuple[str, str]] = Counter()  # demotions by rung
        self.mined: set[Any] = set()  # banks that were mined
        self.num_trims = 0
        self.size_asked = options.nbytes  # of memory
        self.begin_schedule()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def begin_schedule(self) -> None:
        self.needy: Any = None  # the request that asked for room last
        self.short = False  # whether its call got no room
        self.has_shrunk = self.shrinks = False  # whether smaller memory was worked for, or asks for bytes now
        self.asked: dict[str, int] = {}  # most blocks each request asked for
        self.demoted = 0
        self.wanted: list[int] = []  # bytes of the slots that the last call asked for
        self.relieved: list[Any] = []  # waiting requests for which blocks stepped down

    # ---- calls

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
        self.shrinks = False
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
        self.shrinks, self.needy, missing = False, request, self.holdings.num_missing(request, num_tokens)
        self.wanted = self.holdings.lacking(request, num_tokens, spare)
        self.asked[request.request_id] = max(self.asked.get(request.request_id, 0), missing + spare + 1)

    def capacity_of(self, params: Any) -> int:
        """Tokens that fit alone for a request with ``params``."""
        return int(self._space.capacities[self.options.floor(params)])

    def shrink(self) -> int:
        self.shrinks = self.has_shrunk = True
        before, places = self.tables.arena.nbytes, self._places()
        lacks = int(self._space.shrink())
        now = self.tables.arena.nbytes
        gathers = lacks > 0 or now == self.tables.arena.goal_nbytes or self._places() != places
        require(gathers, "a shrink that lacks nothing does not go on")
        require(self.tables.arena.goal_nbytes <= now <= before, "memory shrinks past its goal")
        require((lacks > 0) == lacks_bytes(self), f"a shrink lacks {lacks} bytes")
        return lacks

    def _places(self) -> list[int]:
        """Addresses of all slots."""
        return [block.slot.address for block in self.tables.store.live_blocks()]

    def open(self, request: Any) -> int:
        expected = self.cached.longest(request)
        found = self._space.open(request)
        require(found < request.num_tokens, "nothing is left to compute")
        held = self.holdings.held(request)
        require(found == held, f"{found} tokens found, blocks hold {held}")
        for group, table, blocks in zip(self.options.groups, self.holdings.tables_of(request), expected, strict=True):
            floor = group.floors[self.options.floor(request.params)]
            require(table.floor == floor, f"a table with floor {table.floor} for one who allows {floor}")
            require(list(table) == blocks, f"{len(blocks)} blocks could be shared, or not those that are")
        if request.params.prompt_logprobs is not None:
            require(found == 0, "prompt log-probabilities need every token computed")
        if request.params.num_prefill_tokens is not None:
            require(found == 0, "a scored request attends to others' blocks")
        return int(found)

    def evict(self) -> bool:
        idle, had = self.cached.idle(), self.cached.blocks()
        used, needed = self.tables.arena.used_nbytes, self.short or not self.scheduler.running
        if self.shrinks:
            needed = lacks_bytes(self)
        elif self.needy is None:
            growing = self._num_growing()
            needed = growing > 0 and self.memory.packed(self.holdings.dense(growing)) > self.memory.limit()
        require(needed, "cached blocks are given up without need")
        expected = self.cached.of(min(idle)) if idle else set()
        done = self._space.evict()
        gone = had.keys() - self.cached.blocks().keys()
        require(gone == expected, "other cached blocks are given up than the oldest")
        require(done == bool(idle), f"{len(idle)} cached blocks are idle, one was given up: {done}")
        require(not done or self.tables.arena.used_nbytes < used, "giving up a cached block frees nothing")
        return bool(done)

    def demote(self, steps: Iterable[tuple[Any, int]]) -> int:
        steps = list(steps)
        if self.needy is None and self._is_settling(steps):
            pass
        else:
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
                names = self.options.rung_names(group)
                self.replayed[names[old], names[block.rung]] += 1
                won += self._size(block, old) - block.slot.nbytes
                moved += 1
        if any(
            block.rung != rung for block, rung in steps
        ):  # found no slot there: what is won is not what was reckoned
            self.relieved.clear()
        for (block, rung), old in list(zip(steps, had, strict=True))[-1:]:
            self._check_last(block, rung, old)
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
        found = self._eligible(self._ranks(self.needy.params.tenant), even_recent=True)
        require(not any(map(self._finds_slot, found)), "a request gives way while a block could step down")

    def _is_last_resort(self, block: Any) -> bool:
        """Whether a block may step down alone: no block before it in order finds a slot; recent ones come last."""
        ranks = self._ranks(self.needy.params.tenant)
        if any(map(self._finds_slot, sorted(self._eligible(ranks))[: self._pressure.RELIEF_BLOCKS])):
            return False
        found = self._eligible(ranks, even_recent=True)
        found.sort(key=lambda e: (e.newness > 0, e))
        place = [e.key for e in found].index(id(block))
        return not any(map(self._finds_slot, found[:place]))

    def _finds_slot(self, found: Eligible) -> bool:
        sizes, nbytes = self.options.groups[found.group].sizes, self.tables.arena.nbytes
        return any(self.memory.packed([sizes[rung]]) <= nbytes for rung in range(found.rung + 1, found.floor + 1))

    # ---- who may step down

    def _is_settling(self, steps: list[tuple[Any, int]]) -> bool:
        """Whether these steps are an eager ladder's: past the prompt, past the window, straight to the floor."""
        if not self.options.eager:
            return False
        running = self.scheduler.running
        ready = {request: 0 for request in running if request.num_computed_tokens >= request.num_prefill_tokens}
        allowed = {found.key for found in self._eligible(ready)}
        limit = self._pressure.EAGER_PER_STEP * -(-len(self.scheduler.running) // 32) + self._num_urgent()
        return len(steps) <= limit and all(id(b) in allowed and rung == b.floor for b, rung in steps)

    def _num_urgent(self) -> int:
        """Blocks that need not wait for their turn."""
        scored = [r for r in self.scheduler.running if r.params.num_prefill_tokens is not None]
        return sum(len(table.blocks) for r in scored for table in self.holdings.tables_of(r))

    def _check_relief(self, steps: list[tuple[Any, int]]) -> None:
        """Checks demotions: only under declared pressure, one rung, coldest first, quotas respected."""
        running, tenant, most = self.scheduler.running, None, 8
        require(not self.cached.idle() or self.shrinks, "blocks step down while cached ones are idle")
        if self.shrinks:
            check_steps(self, steps)
            return
        wanted = self.wanted
        if self.needy is None:
            wanted = self.holdings.dense(self._num_growing())
            most = self._pressure.AHEAD_PER_STEP * -(-len(running) // 2)
        else:
            require(self.short, "blocks step down although there is room")
            tenant = self.needy.params.tenant
        require(self.memory.packed(wanted) > self.memory.limit(), "blocks step down for nobody")
        if len(steps) == 1 and self.needy is not None and self._is_last_resort(steps[0][0]):
            return
        expected = sorted(self._eligible(self._ranks(tenant)))[:most]
        expected = expected[: self._num_needed(expected, wanted)]
        require(
            [id(block) for block, _ in steps] == [found.key for found in expected],
            f"the blocks that step down are not the {len(expected)} coldest, which are needed",
        )
        # With quotas, tenants stop paying as their blocks step down.
        if self.needy is not None and self.needy.status is RequestStatus.WAITING and self.options.quota is None:
            self.relieved.append(self.needy)
        require(all(rung == block.rung + 1 for block, rung in steps), "a block jumps a rung")

    def _num_needed(self, expected: list[Eligible], wanted: list[int], taken: int = 0) -> int:
        """How many of the coldest blocks must step down a rung until all that is wanted fits; all if it never does.

        ``taken``: bytes that go.
        """
        groups, limit = self.options.groups, self.memory.limit() - taken
        for number in range(1, len(expected) + 1):
            old, new = ([groups[e.group].sizes[e.rung + below] for e in expected[:number]] for below in (0, 1))
            if self.memory.packed(wanted + new, old) <= limit:
                return number
        return len(expected)

    def _num_growing(self) -> int:
        """Running requests whose next tokens, one for each step looked ahead, begin a block."""
        return sum(
            self.holdings.held(r) < min(r.num_computed_tokens + max(1, self.options.block // 32), r.max_num_tokens)
            and r.num_tokens <= r.num_computed_tokens + 1
            for r in self.scheduler.running
        )

    def check_relieved(self) -> None:
        """Checks that each waiting request for which blocks stepped down runs now."""
        require(all(r in self.scheduler.running for r in self.relieved), "blocks step down for one who is not admitted")

    def _ranks(self, tenant: str | None) -> dict[Any, int]:
        quota, running = self.options.quota, self.scheduler.running
        if quota is None:
            return {r: int(r.params.tenant != tenant) for r in running}
        usage: Counter[str] = Counter()
        for request in running:
            for block in self.holdings.blocks_of(request):
                holders = sum(block in self.holdings.blocks_of(r) for r in running)
                usage[request.params.tenant] += block.slot.nbytes // holders
        over = {name for name, nbytes in usage.items() if nbytes > quota * self.tables.arena.goal_nbytes}
        ranked = [r for r in running if r.params.tenant in over or r.params.tenant == tenant]
        if tenant in over:
            return {r: int(r.params.tenant != tenant) for r in ranked}
        return {r: int(r.params.tenant == tenant) for r in ranked}

    def _eligible(self, ranks: dict[Any, int], *, even_recent: bool = False) -> list[Eligible]:
        """All blocks that may step down, each as its newest holder sees it; narrow ones ``even_recent`` if need be."""
        holders: dict[int, Any] = {}
        for request in self.scheduler.running:
            computed, place = request.num_computed_tokens, 0
            for group, table in zip(self.options.groups, self.holdings.tables_of(request), strict=True):
                oldest = computed - group.recent_tokens(computed)
                for index, block in enumerate(table.blocks, table.first):
                    place += 1
                    if block.rung < block.floor:
                        age = oldest - group.end(index)
                        holders.setdefault(id(block), (block, []))[1].append((age, request, place))
        found = []
        for key, (block, ages) in holders.items():
            if all(request in ranks for _, request, _ in ages) and (
                all(age >= 0 for age, _, _ in ages) or (even_recent and block.rung > 0)
            ):
                age, request, index = min(ages, key=lambda entry: entry[0])
                rank = max(ranks[request] for _, request, _ in ages)
                found.append(
                    Eligible(
                        rank, len(ages) > 1, block.rung, -age, request.arrival, index, key, block.floor, block.group
                    )
                )
        return found

    def check_work(self) -> None:
        """Checks that the demotions in one schedule are bounded by the blocks asked for."""
        groups = self.options.groups
        if all(len(group.sizes) == 1 for group in groups):
            return
        least = min(a - b for group in groups for a, b in pairwise(group.sizes))
        slab, dense = self.tables.arena.slab_nbytes, sum(self.holdings.dense(1))
        running, num_rungs = len(self.scheduler.running), sum(len(group.sizes) for group in groups)
        bound = self._pressure.AHEAD_PER_STEP * -(-running // 2) + self._pressure.EAGER_PER_STEP * -(-running // 32)
        bound += self._num_urgent() + self._pressure.RELIEF_BLOCKS * self.has_shrunk
        for blocks in self.asked.values():
            bound += (blocks * dense + (num_rungs + 2) * slab) // least + 8 * (num_rungs - 1)
        require(self.demoted <= bound, f"{self.demoted} blocks stepped down in one step, at most {bound} had to")
