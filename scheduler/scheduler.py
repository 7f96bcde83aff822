"""The scheduler: computed tokens catch up with known tokens, under a token budget, by priority, turn and arrival.

One rule gives chunked prefill, mixed batches and recompute after a preemption. Pure decisions: no tensors, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import count

from qkv_engine.errors import CapacityError, QKVError, RequestError
from qkv_engine.request import FinishReason, Request, RequestStatus

from .output import ScheduledBatch, ScheduledRequest
from .pace import LEAST_CHUNK, Pace
from .pressure import Pressure
from .queue import RequestQueue
from .space import KVSpace
from .turns import SHARE, in_turn, leaves_places

logger = logging.getLogger("qkv_engine")


class Scheduler:
    """Owns every live request: waiting or running, never both. Called by one thread.

    A step is ``schedule`` -> run the batch -> ``computed`` for each item -> ``append_token`` where one was sampled. The
    next step may be scheduled before the last two calls: its batch then starts from tokens not known to the host yet.
    With a ``pace`` chunks of prompts beside requests that decode have together no more tokens than it says.
    ``takes_turns``: of tenants that wait the one with the fewest running is next, and each leaves others an eighth of
    the places, and of a step's tokens to who has none running.
    ``deterministic``: a prompt is computed block by block, whatever runs beside it, and what a request generated one by
    one, when it is computed again, too.
    """

    def __init__(
        self,
        space: KVSpace,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pace: Pace | None = None,
        takes_turns: bool = False,
        deterministic: bool = False,
    ):
        self.space = space
        self.deterministic = deterministic
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pace = pace
        self.takes_turns = takes_turns
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.pressure = Pressure(space, self.running, deterministic=deterministic)
        self.num_preemptions = 0
        self.copy_nbytes: int | None = None  # that may be copied to and from host memory beside a step; None: any
        self._num_steps = 0
        self._over_quota: set[str] = set()  # tenants whose next request has to wait for one of theirs to leave
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def min_step_tokens(self) -> int:
        """Tokens that a step computes at least of requests that have as many, while there is room."""
        if self.deterministic:
            return 1  # of what was generated
        return self.max_num_batched_tokens if self.pace is None else min(self.max_num_batched_tokens, LEAST_CHUNK)

    def add(self, request: Request) -> None:
        """Adds a request. Raises ``RequestError`` for a live id, ``CapacityError`` if it could never fit."""
        if request.request_id in self.requests:
            raise RequestError("a live request has this id", field="request_id", value=request.request_id)
        capacity = self.space.capacity(request)
        if request.max_num_tokens > capacity:
            raise CapacityError(
                f"{request.num_prompt_tokens} prompt tokens and up to {request.max_tokens} new ones need "
                f"{request.max_num_tokens} tokens of KV memory, which holds {capacity} of such a request",
                remedy="Raise kv_memory, lower max_tokens, or allow a narrower kv_floor",
            )
        request.arrival = next(self._arrivals)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def schedule(self) -> ScheduledBatch:
        """The next step's work, with room reserved for all of it, counted as computed from here on.

        Empty only when there is no request, or when all wait for tokens in flight or for blocks from host memory.
        """
        budget, chunk_budget = self.max_num_batched_tokens, self._chunk_budget()
        kept = self._kept_for_newcomers(chunk_budget)
        items, chunks = list[ScheduledRequest](), list[ScheduledRequest]()
        preempted = self.num_preemptions
        self._num_steps += 1
        self.space.begin_step(self.copy_nbytes)
        if self.space.has_windows:
            self._trim()
        self.pressure.begin_step()
        if self.space.is_shrinking:
            self.pressure.shrink()
        if self.space.has_states:
            self._keep_states()
        for request in self.running:  # a request preempted for one before it is the last, and leaves
            if budget == 0:
                break
            start, target = request.num_computed_tokens, request.num_tokens
            if (request.needs_tokens or target > request.max_num_tokens) and target > len(request.token_ids):
                continue  # its last token is in flight, or the host has to see the one in flight first
            num_tokens = target - start
            is_chunk = num_tokens > 1
            if is_chunk and chunk_budget <= kept:
                continue
            if is_chunk or start == request.num_reserved_tokens:
                wanted = self._wanted(request, min(budget, chunk_budget - kept) if is_chunk else budget)
                num_tokens = self._make_room(request, wanted) if wanted else 0
            if num_tokens:
                end = start + num_tokens
                item = ScheduledRequest(request, start, num_tokens, end, end == target)
                (items if num_tokens == 1 else chunks).append(item)
                budget -= num_tokens
                if is_chunk:
                    chunk_budget -= num_tokens
        started = self._admit(min(budget, chunk_budget)) if self.num_preemptions == preempted else []
        for item in started:
            (items if item.num_tokens == 1 else chunks).append(item)
        items += chunks
        self.space.write_ahead()
        for item in items:
            request = item.request
            request.num_computed_tokens = item.end
            if item.samples:
                request.num_tokens += 1
        return ScheduledBatch(items, [item.request for item in started])

    def computed(self, item: ScheduledRequest) -> None:
        """Notes that the step with the KV of ``item`` ended well, and that all of its tokens are known."""
        request = item.request
        if request.next_cacheable_at <= item.end <= request.num_computed_tokens:  # not preempted since
            self.space.computed(request, item.end)

    def append_token(self, request: Request, token_id: int) -> None:
        """Notes the value of the token of ``request`` that was in flight."""
        request.token_ids.append(token_id)

    def finish(self, request: Request, reason: FinishReason, *, error: QKVError | None = None) -> None:
        """Ends a live request and takes its blocks back.

        A step under way may still write there: the blocks' next owner writes in a later step, which runs after it.
        """
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        request.finish_reason, request.error = reason, error
        request.status = RequestStatus.FINISHED  # from here on it has ended, even if the rest is interrupted
        self._over_quota.discard(request.params.tenant)
        queue.remove(request)
        if error is None:
            self.space.release(request)
        else:
            self.space.discard(request)
        del self.requests[request.request_id]

    def recover(self, space: KVSpace) -> None:
        """Starts over on empty KV memory after a step broke off: every live request waits to be recomputed.

        Needs nothing of the old books but ``requests``, which every method above keeps true at each line.
        """
        self.space = space
        self.waiting, self.running = RequestQueue(), RequestQueue()
        self.pressure = Pressure(space, self.running, deterministic=self.deterministic)
        self._over_quota.clear()
        for request in list(self.requests.values()):
            if request.is_finished:
                del self.requests[request.request_id]
            else:
                request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
                request.num_fetched_pieces = request.num_read_pieces = 0
                request.num_tokens = len(request.token_ids)
                request.finish_reason = request.error = None  # it was about to end
                self.waiting.add(request)

    def park_all(self) -> None:
        """Has all requests wait, and moves everything cached out of KV memory, as far as host memory takes it.

        KV memory is empty then. Every known token of a request must be known to the host.
        """
        self.space.begin_step(None)
        for request in reversed(list(self.running)):
            self._park(request)
        for request in self.waiting:
            request.num_fetched_pieces = 0  # what came for them leaves, too
        while self.space.evict():
            pass

    def withdraw_all(self) -> None:
        """Removes all requests, which must be waiting; none is ended, so each may be added again."""
        for request in list(self.requests.values()):
            self.waiting.remove(request)
            del self.requests[request.request_id]

    def _trim(self) -> None:
        """Has blocks given back that no later token sees, before room is made.

        A step under way may still read them: as for ``finish``, their next owner writes in a later step.
        """
        for request in self.running:
            if request.num_computed_tokens >= request.next_passed_at:
                self.space.trim(request)

    def _keep_states(self) -> None:
        """Has checkpoints taken of the requests that stand at a border.

        The step under way comes before the copies, the one that is scheduled now behind them.
        """
        for request in self.running:
            if request.num_computed_tokens == request.next_checkpoint_at:  # no chunk goes on behind it
                self.pressure.keep_state(request)

    def _chunk_budget(self) -> int:
        """Tokens that the next step may compute of prompts: those of the pace, if a running request decodes."""
        if self.pace is None or not any(request.decodes for request in self.running):
            return self.max_num_batched_tokens
        least = self.space.block_tokens if self.deterministic else 0
        return min(self.max_num_batched_tokens, max(least, self.pace.chunk_tokens))

    def _kept_for_newcomers(self, chunk_budget: int) -> int:
        """Tokens of a step that chunks of prompts leave to tenants that wait and have no request running."""
        if not self.takes_turns or self.deterministic or not self.waiting:  # deterministic chunks are whole blocks
            return 0
        have_none = any(not self.running.number_of(tenant) for tenant in self.waiting.tenants)
        return chunk_budget // (SHARE + 1) if have_none else 0

    def _admit(self, budget: int) -> list[ScheduledRequest]:
        """Lets waiting requests run as far as there is room; returns their work."""
        started: list[ScheduledRequest] = []
        if not self.waiting:
            return started
        self.space.begin_admission(self._num_steps)
        for request in self._in_turn():
            if not budget or len(self.running) == self.max_num_seqs:
                break
            if self.deterministic and budget < self.space.block_tokens:
                break
            # A tenant that waits for its own requests to end holds nobody else up.
            if not self._has_place(request.params.tenant):
                continue
            if request.params.tenant in self._over_quota or not self.space.within_quota(request):
                self._over_quota.add(request.params.tenant)
                continue
            if not self.space.admits(request):
                break
            if self.pressure.fetch(request):
                continue  # it starts when what it lacks has come
            while not (num_tokens := self._start(request, budget)):
                # Shared blocks may be narrower than its own would be, and their slabs leave no room for the rest.
                if self.running or not self._evict_all():
                    return started
            started.append(ScheduledRequest.of(request, request.num_computed_tokens, num_tokens))
            budget -= num_tokens
        return started

    def _in_turn(self) -> Iterable[Request]:
        if self.takes_turns and len(self.waiting.tenants) > 1:
            return in_turn(self.waiting, self.running)
        return list(self.waiting)

    def _has_place(self, tenant: str) -> bool:
        """Whether one more request of ``tenant`` leaves places to others. They are all there for who has no name."""
        if not self.takes_turns or not tenant:
            return True
        return leaves_places(self.running.number_of(tenant), self.max_num_seqs - len(self.running))

    def _evict_all(self) -> bool:
        """Gives up all cached blocks that no request uses; whether there were any."""
        found = False
        while self.space.evict():
            found = True
        return found

    def _start(self, request: Request, budget: int) -> int:
        """Lets a waiting request run if there is room for a token of it; returns for how many, at most ``budget``."""
        request.num_computed_tokens = self.space.open(request)
        self.running.add(request)
        if request.num_computed_tokens:
            self.pressure.joined(request)  # the blocks it shares are its own too now
        wanted = self._wanted(request, budget)
        num_tokens = self.pressure.stretch(request, request.num_computed_tokens + wanted)
        num_tokens -= request.num_computed_tokens
        if num_tokens <= 0:
            request.num_computed_tokens = 0
            self.running.remove(request)
            self.space.release(request)
            self.pressure.left(request)
            return 0
        if self.space.has_states:
            self.pressure.joined(request)  # its states may step down for those behind it
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens > request.num_cached_tokens:
            request.num_cached_tokens, request.cached_tokens = request.num_computed_tokens, request.found_tokens
        return num_tokens

    def _wanted(self, request: Request, budget: int) -> int:
        """Tokens of ``request`` that a step may compute together, at most ``budget``.

        They end where a checkpoint of its states is due. Behind ``num_prefill_tokens`` they end where a block may step
        down, before the next token would attend to it. If they are to be ``deterministic``, they are the prompt's in
        one block, or one, or none within the budget.
        """
        computed, end = request.num_computed_tokens, min(request.num_tokens, request.next_checkpoint_at)
        if self.deterministic:
            is_prompt = computed < request.num_prompt_tokens
            end = min(self.space.block_end(computed), request.num_prompt_tokens) if is_prompt else computed + 1
            return end - computed if end - computed <= budget else 0
        if request.params.num_prefill_tokens is not None:
            is_prefill = computed < request.num_prefill_tokens
            end = min(end, request.num_prefill_tokens if is_prefill else self.space.next_aging(request))
        return min(end - computed, budget)

    def _make_room(self, request: Request, wanted: int) -> int:
        """Makes room for the next tokens, at least one, preempting requests behind it; 0 if it was preempted itself."""
        computed = request.num_computed_tokens
        num_tokens = self.pressure.stretch(request, computed + wanted) - computed
        if num_tokens > 0:
            return num_tokens
        while not self.pressure.make_room(request, computed + 1):
            victim = self.running.last
            self._preempt(victim)
            if victim is request:
                return 0
        return wanted if self.deterministic else 1  # which lie in one block

    def _preempt(self, request: Request) -> None:
        free, computed = self.space.free_blocks(), request.num_computed_tokens
        parked = self._park(request)
        logger.info(
            "preempted %s: %d tokens to recompute, %d of them parked, free blocks %d -> %d",
            request.request_id, computed, parked, free, self.space.free_blocks(),
        )  # fmt: skip
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _park(self, request: Request) -> int:
        """Has a running request wait, and its blocks leave copies in host memory; returns the tokens that have some."""
        parked = self.space.park(request)
        self.running.remove(request)
        self.space.release(request)
        self.pressure.left(request)
        self._over_quota.discard(request.params.tenant)
        request.num_computed_tokens = 0
        request.num_fetched_pieces = request.num_read_pieces = 0
        request.status = RequestStatus.WAITING
        self.waiting.add(request)
        return parked
