"""Response to a shortage of KV memory, in this order: idle cached blocks step down one rung; where none can, one is
given up; the coldest blocks of running requests step down one rung, then their states; a request starts on states that
are narrower from the beginning; no more requests are admitted; the last running request is preempted, by priority and
arrival.

The first running request is never preempted. Every request fits alone on its floor, so it finishes, and so all do
unless more urgent ones keep coming.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from qkv_engine.errors import QKVError
from qkv_engine.request import Request, RequestStatus

from .coldest import Candidate, Coldest, Tally, eligible, eligible_blocks
from .queue import RequestQueue
from .space import BlockLike, FetchLike, KVSpace, ShortageLike

logger = logging.getLogger("qkv_engine")

# Blocks of one demotion: more would hold up a step, fewer would not repay a launch.
RELIEF_BLOCKS = 8
AHEAD_SHARE = 32  # of a block's tokens: room is made for blocks that begin within as many steps; more stays free
AHEAD_PER_STEP = 1  # blocks demoted ahead of need, for every 2 running requests
SHRINK_EVICTIONS = 64  # cached blocks that a shrink of memory gives up in a step
EAGER_PER_STEP = 8  # blocks that an eager ladder demotes, for every 32 running requests


class Pressure:
    """Makes room, and keeps some ahead of need. One object a scheduler; its findings about requests last one step.

    ``deterministic``: the blocks of an eager ladder step down at fixed positions, those of a prompt, too.
    """

    def __init__(self, space: KVSpace, running: RequestQueue, *, deterministic: bool = False):
        self.space, self.running, self.deterministic = space, running, deterministic
        self._ahead_steps = max(1, space.block_tokens // AHEAD_SHARE)
        self._has_quota = space.over_quota(2**62)
        self._coldest: Coldest | None = None  # blocks that may step down in this step
        self._tenant: str | None = None  # that ``_coldest`` was found for
        self._tally: Tally | None = None  # of blocks that may step down in this step
        self._lacking: set[Request] | None = None  # running requests without room for their next token

    def forget(self) -> None:
        """Drops the blocks found; to be called when blocks changed hands."""
        self._coldest = self._tally = None

    def joined(self, request: Request) -> None:
        """Notes that ``request`` begins on blocks that others may hold."""
        self._coldest = None
        if self._tally is not None:
            self._tally.joined(self.space, request)

    def left(self, request: Request) -> None:
        """Drops ``request``, which runs no more and whose blocks were taken back."""
        if self._lacking is not None:
            self._lacking.discard(request)
        self.forget()

    def begin_step(self) -> None:
        """Drops the findings of the last step; then steps blocks down for an eager ladder or the near future."""
        self.forget()
        self._lacking = None
        if self.space.num_rungs == 1:
            return
        if self.space.is_eager:
            self._settle()
        self._look_ahead()

    def shrink(self) -> None:
        """Gives memory back that is to become smaller: free bytes, then idle cached blocks', then running requests'.

        A few blocks a step, so that nobody has to wait.
        """
        for _ in range(SHRINK_EVICTIONS):
            if not self.space.shrink():
                return
            if self._step_down_idle(RELIEF_BLOCKS, self.space.shortage_of_shrink()):
                break
            if not self.space.evict():
                self._step_down_for_shrink()
                break
        self.space.shrink()

    def _step_down_for_shrink(self) -> None:
        """Steps a few blocks of running requests down; under quotas each tenant pays for its own part."""
        if self.space.num_rungs == 1:
            return
        for tenant in dict.fromkeys(r.params.tenant for r in self.running) if self._has_quota else (None,):
            shortage = self.space.shortage_of_shrink()
            if self._step_down(tenant, RELIEF_BLOCKS, shortage) or self._step_down_any(tenant):
                return

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Reserves the first ``num_tokens`` tokens of ``request``, stepping blocks down as needed."""
        while not self._reserve(request, num_tokens):
            found = self._yield_idle(self.space.shortage(request, num_tokens, 0)) or self._relieve(
                request, self.space.shortage(request, num_tokens, 0)
            )
            if not found and not self._step_down_any(request.params.tenant):
                return False
        return True

    def stretch(self, request: Request, num_tokens: int) -> int:
        """Reserves as many of the first ``num_tokens`` tokens as there can be room for; returns their number.

        Leaves each other running request the block for its next token, which admission promised it. Nothing steps down
        unless ``request`` gets a block even with all blocks on their floors: those that begin a slab there may take the
        room that there was. For one that waits no idle block does, or is given up, unless it may start without any.
        Where it may not it begins on states a rung lower, if it allows that.
        """
        if num_tokens == request.num_computed_tokens + 1 and self._reserve(request, num_tokens):
            return num_tokens
        spare = self._num_lacking(request)
        room = self.space.room_for(request, num_tokens, spare)
        runs = request.status is RequestStatus.RUNNING
        if room < num_tokens and (runs or self._could_start_without_idle(request, spare)):
            while room < num_tokens and self._yield_idle(self.space.shortage(request, num_tokens, spare)):
                room = self.space.room_for(request, num_tokens, spare)
        if room < num_tokens and self._could_grow(request, spare):
            while room < num_tokens and self._relieve(request, self.space.shortage(request, num_tokens, spare)):
                room = self.space.room_for(request, num_tokens, spare)
        if room <= request.num_computed_tokens and not runs and self.space.begin_narrower(request):
            return self.stretch(request, num_tokens)
        return room if room > request.num_computed_tokens and self._reserve(request, room) else 0

    def keep_state(self, request: Request) -> None:
        """Has a checkpoint of ``request`` kept, if there is room, or idle blocks alone can make some."""
        shortage = self.space.shortage_to_keep(request)
        if shortage is not None and self._fits_without_idle(shortage):
            while (shortage := self.space.shortage_to_keep(request)) is not None and self._yield_idle(shortage):
                pass
        self.space.keep_state(request)

    def fetch(self, request: Request) -> bool:
        """Has what a waiting request lacks come from host memory, as far as there is room; whether some is on its way.

        Leaves each running request the block for its next token, and one for its own.
        """
        fetching = self.space.begin_fetching(request)
        if fetching is None:
            return False
        spare = self._num_lacking(request)
        while fetching.has_next and self._make_room_to_fetch(request, fetching, spare):
            if not fetching.fetch():
                break
        fetching.end()
        return fetching.is_under_way

    def _make_room_to_fetch(self, request: Request, fetching: FetchLike, spare: int) -> bool:
        """Makes room for the next piece of a waiting request, as for its start: none yields if that wins no room.

        What comes before it is on its way already, perhaps: then idle blocks yield to all of it.
        """
        if fetching.has_room(spare):
            return True
        tenant = request.params.tenant
        if fetching.is_under_way or self._ends_without_idle(fetching.shortage(spare), tenant):
            while self._yield_idle(fetching.shortage(spare)):
                if fetching.has_room(spare):
                    return True
        if self._eased_on_floors(fetching.shortage(spare), tenant):
            while self._relieve(request, fetching.shortage(spare)):
                if fetching.has_room(spare):
                    return True
        return False

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        done = self.space.reserve(request, num_tokens)
        if done and self._lacking is not None and num_tokens > request.num_computed_tokens:
            self._lacking.discard(request)
        return done

    def _num_lacking(self, request: Request) -> int:
        """Number of running requests but ``request`` whose next token begins a block; all are looked at once a step."""
        if self._lacking is None:
            self._lacking = self.space.lacking(self.running)
        return len(self._lacking) - (request in self._lacking)

    def _yield_idle(self, shortage: ShortageLike) -> bool:
        """Has idle cached blocks make room: a few step down, or else one is given up; ``False`` if there are none."""
        return self._step_down_idle(RELIEF_BLOCKS, shortage) > 0 or self.space.evict()

    def _step_down_idle(self, number: int, shortage: ShortageLike) -> int:
        """Steps idle cached blocks down a rung, at most ``number``, no more than ``shortage`` needs; how many did."""
        steps = list[tuple[BlockLike, int]]()
        for block in self.space.idle(number):
            steps.append((block, block.rung + 1))
            if shortage.eased(block.group, block.rung, block.rung + 1):
                break
        if not steps:
            return 0
        before = self.space.free_blocks()
        done = self.space.demote(steps)
        if logger.isEnabledFor(logging.INFO):
            after = self.space.free_blocks()
            logger.info("%d idle cached blocks stepped down; free 16-bit blocks %d -> %d", done, before, after)
        return done

    def _relieve(self, request: Request, shortage: ShortageLike) -> bool:
        """Steps a few blocks down for the room that lacks; ``False`` if none may."""
        if self.space.num_rungs == 1:
            return False
        return self._step_down(request.params.tenant, RELIEF_BLOCKS, shortage) > 0

    def _could_start_without_idle(self, request: Request, spare: int) -> bool:
        """Whether a token of a waiting ``request`` had room without idle blocks, or if others stepped down, too."""
        return self._ends_without_idle(self._shortage_of_growth(request, spare), request.params.tenant)

    def _could_grow(self, request: Request, spare: int) -> bool:
        """Whether another token of ``request`` had room if all blocks that may step down stood on their floors."""
        return self._eased_on_floors(self._shortage_of_growth(request, spare), request.params.tenant)

    def _shortage_of_growth(self, request: Request, spare: int) -> ShortageLike:
        return self.space.shortage(request, request.num_reserved_tokens + 1, spare)

    def _ends_without_idle(self, shortage: ShortageLike, tenant: str) -> bool:
        """Whether ``shortage`` ended without idle blocks, or if others stepped down for ``tenant``, too."""
        has_idle = bool(self.space.idle_kinds())
        return self._fits_without_idle(shortage) or (has_idle and self._eased_on_floors(shortage, tenant))

    def _fits_without_idle(self, shortage: ShortageLike) -> bool:
        """Whether ``shortage`` ended if all idle blocks were given up."""
        enough = False
        for kind, number in self.space.idle_kinds().items():
            enough = shortage.without(*kind, number)
        return enough

    def _eased_on_floors(self, shortage: ShortageLike, tenant: str) -> bool:
        """Whether ``shortage`` ended if all blocks that may step down for ``tenant`` stood on their floors."""
        if self._tally is None or self._has_quota:  # without quotas all tenants' blocks may step down
            ranks = self._ranks(tenant, self.space.aged(self.running))
            self._tally = Tally(eligible_blocks(self.space, self.running, ranks))
        enough = False
        for steps, number in self._tally.items():
            enough = shortage.eased(*steps, number)
        return enough

    def _look_ahead(self) -> None:
        """Makes room for the blocks that begin within ``_ahead_steps`` steps, a few blocks a step.

        So no step has to wait for many, and nothing steps down for a request that does not grow.
        """
        if self.space.has_blocks(len(self.running)):
            return
        wanted = self.space.num_growing(self.running, self._ahead_steps)
        number = AHEAD_PER_STEP * -(-len(self.running) // 2)
        while not self.space.has_blocks(wanted):
            if self._step_down_idle(number, self.space.shortage_of(wanted)):
                return
            if not self.space.evict():
                self._step_down(None, number, self.space.shortage_of(wanted))
                return

    def _settle(self) -> None:
        """Steps an eager ladder's blocks outside the recent window down to their floors, after the prompt.

        Requests with ``num_prefill_tokens`` do not wait for their turn, so that their KV depends on no other request.
        """
        if self.deterministic:
            self._settle_all()
            return
        budget = EAGER_PER_STEP * -(-len(self.running) // 32)
        ready = [r for r in self.space.aged(self.running) if r.num_computed_tokens >= r.num_prefill_tokens]
        if not ready:
            return
        found = eligible(self.space, self.running, dict.fromkeys(ready, 0))
        urgent = [c for c in found if c.request.params.num_prefill_tokens is not None]
        others = [c for c in found if c.request.params.num_prefill_tokens is None]
        self._demote([(candidate, candidate.block.floor) for candidate in urgent + others[:budget]])

    def _settle_all(self) -> None:
        """Steps all blocks outside the recent window down to their floors, before the next token attends to them.

        Raises ``QKVError`` where one finds no room, which the reserve is there for: everything is computed again then.
        """
        ready = self.space.aged(self.running)
        found = eligible(self.space, self.running, dict.fromkeys(ready, 0)) if ready else []
        self._demote([(candidate, candidate.block.floor) for candidate in found])
        if self.space.aged(ready):
            raise QKVError("a block finds no room to step down")

    def _step_down(self, tenant: str | None, number: int, shortage: ShortageLike) -> int:
        """Steps the coldest blocks down a rung, at most ``number``, no more than ``shortage`` needs; how many did."""
        # With quotas, each block may change which tenants are over theirs.
        if self._coldest is None or self._tenant != tenant or self._has_quota:
            ranks = self._ranks(tenant, self.space.aged(self.running))
            self._coldest, self._tenant = Coldest(self.space, self.running, ranks), tenant
        found = self._coldest.take(number, lambda c: shortage.eased(c.block.group, c.rung, c.rung + 1))
        return self._demote([(candidate, candidate.rung + 1) for candidate in found])

    def _step_down_any(self, tenant: str | None) -> bool:
        """Steps down the coldest block that finds a slot, when the coldest of all find none: the last resort.

        Blocks that are on a narrower rung already, since they are shared, count even in a recent window.
        """
        tried = set[tuple[int, int, int]]()
        found = eligible(self.space, self.running, self._ranks(tenant, self.running), even_recent=True)
        for candidate in sorted(found, key=lambda candidate: (candidate.newness > 0, candidate)):
            steps = (candidate.block.group, candidate.rung, candidate.block.floor)
            if steps not in tried and self._demote([(candidate, candidate.rung + 1)]):
                return True
            tried.add(steps)
        return False

    def _ranks(self, tenant: str | None, requests: Iterable[Request]) -> dict[Request, int]:
        """Ranks of the ``requests`` whose blocks may step down if ``tenant`` needs room; rank 0 goes first.

        With quotas, tenants over theirs come before one within it, whose blocks step down for its own need alone.
        """
        if not self._has_quota:
            return {request: int(request.params.tenant != tenant) for request in requests}
        usage: dict[str, int] = {}
        for request in self.running:
            name = request.params.tenant
            usage[name] = usage.get(name, 0) + self.space.nbytes(request)
        over = {name for name, nbytes in usage.items() if self.space.over_quota(nbytes)}
        ranks = {}
        for request in requests:
            name = request.params.tenant
            if name == tenant or name in over:
                ranks[request] = int(name != tenant if tenant in over else name not in over)
        return ranks

    def _demote(self, chosen: list[tuple[Candidate, int]]) -> int:
        if not chosen:
            return 0
        before = self.space.free_blocks()
        done = self.space.demote([(candidate.block, rung) for candidate, rung in chosen])
        if any(candidate.block.rung != rung for candidate, rung in chosen):
            self.forget()  # its order assumed that every block reaches its rung
        elif self._tally is not None:
            self._tally.stepped_down(candidate.block for candidate, _ in chosen)
        if logger.isEnabledFor(logging.INFO):
            self._explain([candidate for candidate, _ in chosen], before)
        return done

    def _explain(self, chosen: list[Candidate], before: int) -> None:
        named = [(c, [self.space.rung_name(c.block.group, rung) for rung in (c.rung, c.block.rung)]) for c in chosen]
        moved = [(c.request.request_id, c.is_state, *names) for c, names in named if c.block.rung > c.rung]
        for (name, are_states, old, new), number in Counter(moved).items():
            what = f"block{'s'[: number > 1]} ({number * self.space.block_tokens} tokens)"
            what = f"state{'s'[: number > 1]}" if are_states else what
            after = self.space.free_blocks()
            logger.info(
                "%s: %d %s stepped down %s -> %s; free 16-bit blocks %d -> %d",
                name, number, what, old, new, before, after,
            )  # fmt: skip
