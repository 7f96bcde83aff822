"""Who has to make room by the spy's reckoning: idle cached blocks, then those of running requests, coldest first."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any, NamedTuple

from qkv_engine.request import RequestStatus

from .broken import require
from .cached import Cached
from .holdings import Holdings
from .memory import Memory
from .options import Options
from .shrinks import bytes_to_take, check_steps, lacks_bytes


class Eligible(NamedTuple):
    """A block that may step down by the spy's reckoning; sorts in the order of stepping down."""

    rank: int
    is_state: bool
    shared: bool
    order: int  # of a state the rungs to its floor, in negative numbers
    newness: int
    arrival: int
    index: int
    key: int
    rung: int
    floor: int
    group: int


class Relief:
    """Checks that blocks step down, or are given up, for somebody who needs it, no more than that, and in order."""

    def __init__(self, tables: Any, options: Options, pressure: ModuleType, cached: Cached):
        self.tables, self.options, self._pressure, self.cached = tables, options, pressure, cached
        self.memory, self.holdings = Memory(tables, options), Holdings(tables, options)
        self.scheduler: Any = None
        self.begin_schedule()

    def begin_schedule(self) -> None:
        self.needy: Any = None  # the request that asked for room last
        self.short = False  # whether its call got no room
        self.asked: dict[str, int] = {}  # most blocks each request asked for
        self.demoted = 0
        self.wanted: list[int] = []  # bytes of the slots that the last call asked for
        self.relieved: list[Any] = []  # waiting requests for which blocks stepped down
        self.num_ahead = 0  # blocks that stepped down ahead of need
        self.shrinks = False  # whether smaller memory asks for bytes now
        self.num_shrunk = 0  # blocks that stepped down for it

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
        size, nbytes = self.options.groups[found.group].size, self.tables.arena.nbytes
        return any(self.memory.packed([size(rung)]) <= nbytes for rung in range(found.rung + 1, found.floor + 1))

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
        require(not self.cached.idle(), "blocks step down while cached ones are idle")
        self._check_stuck("a request's blocks step down while a cached one could")
        if self.shrinks:
            check_steps(self, steps)
            return
        tenant = None if self.needy is None else self.needy.params.tenant
        wanted, most = self._need()
        if len(steps) == 1 and self.needy is not None and self._is_last_resort(steps[0][0]):
            return
        expected = sorted(self._eligible(self._ranks(tenant)))[:most]
        expected = expected[: self._num_needed(expected, wanted)]
        require(
            [id(block) for block, _ in steps] == [found.key for found in expected],
            f"the blocks that step down are not the {len(expected)} coldest, which are needed",
        )
        self._note_relieved()
        require(all(rung == block.rung + 1 for block, rung in steps), "a block jumps a rung")

    def _check_idle_relief(self, steps: list[tuple[Any, int]]) -> None:
        """Checks demotions of cached blocks that nobody holds: under pressure, one rung, coldest first."""
        expected = self._idle_in_turn(*self._need())
        found = [id(block) for block, _ in steps]
        require(found == [e.key for e in expected], f"other idle blocks step down than the {len(expected)} coldest")
        self._note_relieved()
        require(all(rung == block.rung + 1 for block, rung in steps), "an idle block jumps a rung")

    def _need(self) -> tuple[list[int], int]:
        """What is wanted, which must not fit, and the most blocks that may step down for it."""
        require(self.needy is None or self.short, "blocks step down although there is room")
        require(not self.shrinks or lacks_bytes(self), "blocks step down for a shrink that needs none")
        wanted, most = self._wanted()
        require(self.memory.packed(wanted) > self._limit(), "blocks step down for nobody")
        return wanted, most

    def _limit(self) -> int:
        """Bytes that may be in use when there is enough room."""
        return self.memory.limit() - (bytes_to_take(self) if self.shrinks else 0)

    def _note_few(self, number: int) -> None:
        """Counts blocks that step down for a shrink, or ahead of need: few in a step."""
        if self.shrinks:
            self.num_shrunk += number
            require(self.num_shrunk <= self._pressure.RELIEF_BLOCKS, "a shrink makes a step long")
        elif self.needy is None:
            self.num_ahead += number
            require(self.num_ahead <= self._most_ahead(), "too many blocks step down ahead of need")

    def _wanted(self) -> tuple[list[int], int]:
        """Bytes of the slots that are wanted, and the most blocks that may step down for them at once."""
        if self.shrinks:
            return [], 8
        if self.needy is None:
            return self.holdings.dense(self._num_growing()), self._most_ahead()
        return self.wanted, 8

    def _check_stuck(self, message: str) -> None:
        """Checks that no cached block that nobody holds, and whose turn it is, can step down."""
        require(not any(map(self._finds_slot, self._idle_in_turn(*self._wanted()))), message)

    def _idle_in_turn(self, wanted: list[int], most: int) -> list[Eligible]:
        """The cached blocks that nobody holds and that step down together, as many as are needed."""
        found = self._idle(most)
        return found[: self._num_needed(found, wanted)]

    def _most_ahead(self) -> int:
        """Blocks that may step down ahead of need in a step."""
        return int(self._pressure.AHEAD_PER_STEP * -(-len(self.scheduler.running) // 2))

    def _note_relieved(self) -> None:
        """Notes a waiting request that others make room for: it has to run then."""
        # With quotas, tenants stop paying as their blocks step down.
        if self.needy is not None and self.needy.status is RequestStatus.WAITING and self.options.quota is None:
            self.relieved.append(self.needy)

    def _idle(self, number: int) -> list[Eligible]:
        """The first cached blocks to step down that nobody holds."""
        groups, blocks = self.options.groups, enumerate(self.cached.coldest(number))
        return [
            Eligible(0, False, False, 0, place, 0, 0, id(b), b.rung, groups[b.group].last(b.rung), b.group)
            for place, b in blocks
        ]

    def _num_needed(self, expected: list[Eligible], wanted: list[int]) -> int:
        """How many of the coldest blocks must step down a rung until all that is wanted fits; all if it never does."""
        groups, limit = self.options.groups, self._limit()
        for number in range(1, len(expected) + 1):
            old, new = ([groups[e.group].size(e.rung + below) for e in expected[:number]] for below in (0, 1))
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
                for slot in table.slots:
                    if self.options.state_below and group.place(slot.rung)[0] in self.options.state_slots:
                        place += 1
                        if group is self.options.groups[0] and slot.rung < slot.floor:
                            holders[id(slot)] = slot, [(computed, request, place)]
        found = []
        for key, (block, ages) in holders.items():
            if all(request in ranks for _, request, _ in ages) and (
                all(age >= 0 for age, _, _ in ages) or (even_recent and block.rung > 0)
            ):
                age, request, index = min(ages, key=lambda entry: entry[0])
                rank, is_state = max(ranks[request] for _, request, _ in ages), block.rung < 0
                order = block.rung - block.floor if is_state else block.rung
                where = request.arrival, index, key, block.rung, block.floor, block.group
                found.append(Eligible(rank, is_state, len(ages) > 1, order, -age, *where))
        return found
