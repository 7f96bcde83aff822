"""KV memory as the scheduler sees it: block tables and prefix cache of requests with floors. No torch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from ..request import KVUsage, Request
from .block import Block
from .demand import OPEN_END_BLOCKS, RunningDemand
from .disk import DiskStats
from .disk_traffic import DiskTraffic
from .fetching import Fetching
from .hits import Hit
from .prefix import PrefixCache
from .shortage import Shortage
from .table import BlockTables


class KVManager:
    """Implements ``scheduler.KVSpace``. Owned by the scheduler's thread, like everything below it."""

    def __init__(
        self,
        tables: BlockTables,
        prefix: PrefixCache | None,
        quota: float | None = None,
        *,
        open_end_blocks: int = OPEN_END_BLOCKS,
        deterministic: bool = False,
    ):
        """``deterministic``: requests share a prefix as they would have computed it, and nothing that was generated."""
        self._is_exact = deterministic
        self.tables, self.quota = tables, quota
        self.spec = spec = tables.spec
        self.num_rungs, self.block_tokens, self.is_eager = spec.num_rungs, spec.block_tokens, spec.eager
        self.has_windows, self.has_states = spec.has_windows, spec.has_states
        self._blocks = tables.main if len(tables.groups) == 1 else tables  # asked often: a lone group answers itself
        self.prefix = prefix if self.spec.can_share else None
        self._host = None if self.prefix is None else self.prefix.host
        self.demand = RunningDemand(tables, open_end_blocks)
        self.capacities = self.capacities_of(tables)  # by floor
        self._demotable_at: dict[Request, int] = {}  # computed tokens at which a block can first step down, if known
        self._floor_epoch = 0  # of the tables, for which these are known

    def rung_name(self, group: int, rung: int) -> str:
        return self.spec.groups[group].name_of(rung)

    def capacities_of(self, empty: BlockTables) -> tuple[int, ...]:
        """Tokens of one request that fits alone in its tenant's share of ``empty`` tables, by its floor."""
        return tuple(empty.max_tokens(rung, self.quota or 1.0) for rung in range(self.num_rungs))

    def resize(self, nbytes: int) -> None:
        """Has at most ``nbytes`` of memory held: more at once, less as far as ``shrink`` takes it."""
        self.tables.store.resize(nbytes)
        self.capacities = self.capacities_of(self.tables.renewed())

    @property
    def is_shrinking(self) -> bool:
        return self.tables.arena.is_shrinking

    def shrink(self) -> int:
        return self.tables.store.shrink()

    def shortage_of_shrink(self) -> Shortage:
        arena = self.tables.arena
        return Shortage(self.tables, {}, arena.nbytes - arena.goal_nbytes)

    def capacity(self, request: Request) -> int:
        return self.capacities[request.floor]

    def begin_admission(self, step: int) -> None:
        """Updates the demand of running requests, which ``admits`` and ``within_quota`` count with."""
        self.demand.catch_up(step)

    def admits(self, request: Request) -> bool:
        """Whether ``request`` and all running ones fit together when grown: on ``admit_at``, and on their floors."""
        if not self.demand:
            return True  # it fits alone on its floor, even where ``admit_at`` names a wider rung
        together = self.demand.total.plus(self.demand.share(request))
        if self.spec.admit_at < self.num_rungs - 1 and not self.tables.fits(together.slots(self.spec.admit_at)):
            return False
        return self.tables.fits_whatever_stepped_down(together.slots(self.num_rungs - 1), together.floors())

    def within_quota(self, request: Request) -> bool:
        """Whether ``request`` and its tenant's running requests stay within the tenant's share of memory."""
        same = None if self.quota is None else self.demand.of_tenant(request.params.tenant)
        if self.quota is None or same is None:
            return True
        together = same.plus(self.demand.share(request))
        return self.tables.fits(together.slots(self.spec.admit_at), self.quota)

    # ---- host memory

    def begin_step(self, copy_nbytes: int | None) -> None:
        if self.prefix is not None:
            self.prefix.expire()
        if self._host is not None:
            self._host.begin_step(copy_nbytes)

    def write_ahead(self) -> None:
        if self._host is not None:
            self._host.write_ahead()

    def park(self, request: Request) -> int:
        return 0 if self._host is None else self._host.park(self.blocks(request))

    def begin_fetching(self, request: Request) -> Fetching | None:
        if self._host is None or not self._may_share(request):
            return None
        return self._host.begin_fetching(request)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are to be copied to host memory, or from there, beside the next step."""
        return self._host is not None and self._host.tier.has_copies

    @property
    def has_unwritten(self) -> bool:
        """Whether idle blocks may be left that could be copied to host memory while nothing runs."""
        return self._host is not None and self._host.has_unwritten

    @property
    def num_commands(self) -> int:
        """Commands with copies to and from host memory that were taken; 0 without a host tier."""
        return 0 if self._host is None else self._host.tier.num_commands

    def confirm(self, command: int) -> None:
        """Notes that commands up to this one have ended, and that it is known which blocks they found to be bad."""
        if self._host is not None:
            self._host.tier.confirm(command)

    def ended(self, command: int) -> None:
        """Notes that all copies of commands up to this one are over."""
        if self._host is not None:
            self._host.tier.ended(command)

    @property
    def _disk(self) -> DiskTraffic | None:
        return None if self._host is None else self._host.disk

    @property
    def has_unsaved(self) -> bool:
        """Whether something is cached, or kept in host memory, that the disk lacks and could write."""
        return self._disk is not None and self._disk.has_unsaved

    @property
    def waits_for_disk(self) -> bool:
        """Whether something is to be read from the disk, or written."""
        return self._disk is not None and (self._disk.has_unsaved or self._disk.is_reading)

    def disk_stats(self) -> DiskStats:
        """What has moved between host memory and the disk."""
        return DiskStats() if self._disk is None else self._disk.stats()

    def wait_for_disk(self, seconds: float) -> bool:
        """Waits for the disk, at most so long; whether there may be anything to do then."""
        return self._disk is None or self._disk.wait(seconds)

    # ---- requests

    def open(self, request: Request) -> int:
        floor, hit, prefix = request.floor, Hit(), self._prefix_of(request)
        if prefix is not None and self._may_share(request):
            limit = request.num_tokens - 1  # at least one token is computed, for its logits
            if self._is_exact:
                limit = min(limit, request.num_prompt_tokens)
            salt = request.params.cache_salt
            hit = prefix.lookup(request.token_ids, salt, floor, limit, request.pieces, is_exact=self._is_exact)
        request.found_tokens = hit.by_rung(self.spec.main, self.tables.main.index)
        self.demand.add(request)
        self.tables.open(
            request.request_id,
            floor,
            hit.blocks,
            num_shared_tokens=hit.num_tokens,
            num_prompt_tokens=request.num_prefill_tokens,
        )
        request.num_reserved_tokens = self.tables.held(request.request_id)
        request.next_cacheable_at = 0
        request.next_checkpoint_at = sys.maxsize
        if prefix is not None and self.has_states:
            borders = prefix.checkpoints.begin(request.request_id, request.num_tokens, hit.num_cached, hit.checkpoint)
            request.next_checkpoint_at = borders.after(hit.num_tokens)
        if self.has_windows:
            request.next_passed_at = self.tables.next_passed_at(request.request_id)
        return request.num_reserved_tokens

    def room_for(self, request: Request, num_tokens: int, spare: int = 0) -> int:
        return self.tables.room_for(request.request_id, num_tokens, spare)

    def shortage(self, request: Request, num_tokens: int, spare: int) -> Shortage:
        return Shortage(self.tables, self.tables.wanted(request.request_id, num_tokens, spare))

    def shortage_of(self, num_blocks: int) -> Shortage:
        return Shortage(self.tables, self.tables.dense(num_blocks))

    def lacking(self, running: Iterable[Request]) -> set[Request]:
        return {r for r in running if r.num_computed_tokens >= r.num_reserved_tokens}

    def num_growing(self, running: Iterable[Request], num_tokens: int) -> int:
        # A request that computes its prompt gets blocks in the step that needs them.
        return sum(
            r.num_reserved_tokens < min(r.num_computed_tokens + num_tokens, r.max_num_tokens)
            and r.num_tokens - r.num_computed_tokens <= 1
            for r in running
        )

    def reserve(self, request: Request, num_tokens: int) -> bool:
        done = self.tables.reserve(request.request_id, num_tokens)
        request.num_reserved_tokens = self.tables.held(request.request_id)
        if done and self.prefix is not None and self.prefix.checkpoints.held:
            self.prefix.checkpoints.restore(request.request_id)
        return done

    def begin_narrower(self, request: Request) -> bool:
        return self.tables.begin_narrower(request.request_id)

    def trim(self, request: Request) -> None:
        request.next_passed_at = self.tables.trim(request.request_id, request.num_computed_tokens)

    def release(self, request: Request) -> None:
        params = request.params
        if self.prefix is not None and (params.session or params.retain is not None):
            self.prefix.note_hints(request.token_ids[: request.num_computed_tokens], params)
        self._take_back(request)

    def discard(self, request: Request) -> None:
        """Releases a failed request and takes its blocks out of the prefix cache."""
        if request.request_id in self.tables:
            self.distrust(list(self.tables.blocks(request.request_id)))
        if self.prefix is not None:
            self.prefix.checkpoints.distrust(request.request_id)
        self._take_back(request)

    def _take_back(self, request: Request) -> None:
        self.demand.remove(request)
        self._demotable_at.pop(request, None)
        if self.prefix is not None:
            self.prefix.forget(request.request_id)
        self.tables.release(request.request_id)

    def distrust(self, blocks: Collection[Block]) -> None:
        """Takes blocks with bad values out of the prefix cache, and copies of them out of the host tier."""
        if self.prefix is not None:
            self.prefix.purge(blocks)

    def computed(self, request: Request, num_tokens: int) -> None:
        prefix = self._prefix_of(request)
        if prefix is not None and self._is_exact and num_tokens >= request.num_prompt_tokens:
            num_tokens = request.num_prompt_tokens
            self._publish(prefix, request, num_tokens)
            request.next_cacheable_at = sys.maxsize
            return
        if prefix is not None:
            self._publish(prefix, request, num_tokens)
        request.next_cacheable_at = sys.maxsize if prefix is None else prefix.next_end(num_tokens)

    @staticmethod
    def _publish(prefix: PrefixCache, request: Request, num_tokens: int) -> None:
        salt, tenant = request.params.cache_salt, request.params.tenant
        prefix.publish(request.request_id, request.token_ids, salt, num_tokens, tenant, request.pieces)

    # ---- checkpoints of states

    def shortage_to_keep(self, request: Request) -> Shortage | None:
        prefix, computed = self._prefix_of(request), request.num_computed_tokens
        if prefix is None:
            return None
        wanted = prefix.checkpoints.wanted(request.request_id, self._key_of(prefix, request), computed)
        return Shortage(self.tables, wanted) if wanted and not self.tables.arena.has_room(wanted) else None

    def keep_state(self, request: Request) -> None:
        prefix, computed = self._prefix_of(request), request.num_computed_tokens
        if prefix is None:
            return
        if self.shortage_to_keep(request) is None:
            prefix.checkpoints.take(request.request_id, self._key_of(prefix, request), computed)
        request.next_checkpoint_at = prefix.checkpoints.after(request.request_id, computed)

    def _key_of(self, prefix: PrefixCache, request: Request) -> bytes:
        """The key of all that a request has computed."""
        tokens, salt = request.token_ids, request.params.cache_salt
        return prefix.key_at(tokens, salt, request.num_computed_tokens, request.pieces)

    def done(self, tenant: str, session: str) -> int:
        """Has cached pieces of a session make room before all others; returns their number."""
        return 0 if self.prefix is None else self.prefix.done(tenant, session)

    def _may_share(self, request: Request) -> bool:
        """Whether a request may begin on blocks of others: prompt log-probabilities need all tokens computed."""
        return self._prefix_of(request) is not None and request.params.prompt_logprobs is None

    def _prefix_of(self, request: Request) -> PrefixCache | None:
        """The prefix cache; None under ``num_prefill_tokens``, since shared blocks step down when others allow it."""
        return self.prefix if request.params.num_prefill_tokens is None else None

    def has_blocks(self, number: int) -> bool:
        return self.tables.has_blocks(number)

    def free_blocks(self) -> int:
        return self.tables.free_blocks()

    def idle(self, number: int) -> list[Block]:
        return [] if self.prefix is None else self.prefix.coldest(number)

    def idle_kinds(self) -> Counter[tuple[int, int]]:
        return Counter() if self.prefix is None else self.prefix.idle_kinds()

    def evict(self) -> bool:
        return self.prefix is not None and self.prefix.evict()

    def blocks(self, request: Request) -> Iterator[Block]:
        return self.tables.blocks(request.request_id)

    def unsettled(self, request: Request) -> Iterator[tuple[Block, int]]:
        return self._blocks.unsettled(request.request_id, request.num_computed_tokens)

    def coldest(self, request: Request) -> tuple[Block, int] | None:
        return self._blocks.coldest(request.request_id, request.num_computed_tokens)

    def aged(self, running: Iterable[Request]) -> list[Request]:
        epoch = self.tables.floor_epoch
        if self._floor_epoch != epoch:
            self._demotable_at.clear()
            self._floor_epoch = epoch
        demotable_at = self._demotable_at.get  # asked of each running request in each step
        return [r for r in running if r.num_computed_tokens >= demotable_at(r, 0) and self._has_aged(r)]

    def _has_aged(self, request: Request) -> bool:
        demotable_at = self._demotable_at[request] = self._blocks.next_demotable_at(request.request_id)
        return request.num_computed_tokens >= demotable_at

    def block_end(self, num_computed: int) -> int:
        group = self.spec.main
        if num_computed < group.sink:
            return group.sink
        return group.tokens_in(group.in_blocks(num_computed) // group.block_tokens + 1)

    def next_aging(self, request: Request) -> int:
        groups = (group for group in self.spec.groups if group.floors[request.floor])
        return min((group.next_aging(request.num_computed_tokens) for group in groups), default=sys.maxsize)

    def demote(self, steps: list[tuple[Block, int]]) -> int:
        done = self.tables.demote(steps)
        if self._host is not None:
            self._host.stepped_down(block for block, _ in steps)
        return done

    def nbytes(self, request: Request) -> int:
        """Bytes of a request's blocks, shared ones divided among the requests that hold them."""
        return sum(block.slot.nbytes // len(block.holders) for block in self.tables.blocks(request.request_id))

    def over_quota(self, nbytes: int) -> bool:
        """Whether ``nbytes`` are more than one tenant's share."""
        return self.quota is not None and nbytes > self.quota * self.tables.arena.goal_nbytes

    def usage(self, request: Request) -> KVUsage:
        """Rungs of the blocks that hold a request's tokens but the last one, which needs no KV when it ends.

        And those of its states, and of the tokens that it found in the prefix cache.
        """
        if request.request_id not in self.tables:
            return KVUsage()
        num_blocks = self.spec.main.blocks_for(len(request.token_ids) - 1)
        tables = self.tables.of(request.request_id)
        rungs = Counter(
            (block.group, block.rung) for table in tables for block in table.blocks[: max(0, num_blocks - table.first)]
        )
        bits = [self.spec.groups[group].rungs[rung].bits for group, rung in rungs]
        blocks: Counter[str] = Counter()
        for (group, rung), number in sorted(rungs.items()):
            blocks[self.rung_name(group, rung)] += number
        holds_any = self.spec.main.num_token_slots and any(table.slots for table in tables)
        lowest = min(bits, default=self.spec.main.widest.bits if holds_any else None)
        states = Counter(
            group.spec.name_of(state.rung) for group in self.tables.groups for state in group.states(request.request_id)
        )
        return KVUsage(dict(blocks), lowest, request.cached_tokens, request.num_stored_tokens, dict(states))
