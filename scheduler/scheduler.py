"""The scheduler: computed tokens catch up with known tokens, under a token budget, first come first served.

One rule gives chunked prefill, mixed batches and recompute after a preemption. Pure decisions: no tensors, no clock.
"""

from __future__ import annotations

import logging
from itertools import count

from qkv_engine.errors import CapacityError, QKVError, RequestError
from qkv_engine.request import FinishReason, Request, RequestStatus

from .output import ScheduledBatch, ScheduledRequest
from .pressure import KVSpace, can_admit, choose_victim
from .queue import ArrivalQueue

logger = logging.getLogger("qkv_engine")


class Scheduler:
    """Owns every live request: waiting or running, never both. Called by one thread.

    A step is ``schedule`` -> run the batch -> ``computed`` for each item -> ``append_token`` where one was sampled.
    """

    def __init__(self, space: KVSpace, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.space = space
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.waiting = ArrivalQueue()
        self.running = ArrivalQueue()
        self.num_preemptions = 0
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Takes a request in. Raises ``RequestError`` for a live id, ``CapacityError`` if it could never fit."""
        if request.request_id in self.requests:
            raise RequestError("a live request has this id", field="request_id", value=request.request_id)
        if request.max_num_tokens > self.space.capacity:
            raise CapacityError(
                f"{request.num_prompt_tokens} prompt tokens and up to {request.max_tokens} new ones need "
                f"{request.max_num_tokens} tokens of KV memory, which holds {self.space.capacity}",
                remedy="Raise kv_memory or lower max_tokens",
            )
        request.arrival = next(self._arrivals)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def schedule(self) -> ScheduledBatch:
        """The next step's work, with room reserved for all of it. Empty only when there is no request."""
        budget = self.max_num_batched_tokens
        items: list[ScheduledRequest] = []
        preempted = self.num_preemptions
        for request in list(self.running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older request above
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if self._reserve(request, request.num_computed_tokens + num_tokens):
                items.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
                budget -= num_tokens
        if self.num_preemptions == preempted:
            self._admit(items, budget)
        items.sort(key=lambda item: item.num_tokens > 1)  # stable: single tokens first
        return ScheduledBatch(items)

    def computed(self, item: ScheduledRequest) -> None:
        """The KV of ``item`` is in the cache."""
        item.request.num_computed_tokens = item.end

    def append_token(self, request: Request, token_id: int) -> None:
        """A token was sampled for ``request``."""
        request.token_ids.append(token_id)

    def finish(self, request: Request, reason: FinishReason, *, error: QKVError | None = None) -> None:
        """Ends a live request and takes its blocks back."""
        del self.requests[request.request_id]
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        queue.remove(request)
        self.space.release(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error

    def _admit(self, items: list[ScheduledRequest], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting.oldest
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if not can_admit(self.space, request, len(self.running)):
                return
            self.space.reserve(request.request_id, request.num_tokens)
            self.waiting.remove(request)
            self.running.add(request)
            request.status = RequestStatus.RUNNING
            items.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
            budget -= num_tokens

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserves room, preempting younger requests as needed; ``False`` if ``request`` itself had to go."""
        while not self.space.reserve(request.request_id, num_tokens):
            victim = choose_victim(self.running)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        free = self.space.num_free_blocks
        self.running.remove(request)
        self.space.release(request.request_id)
        logger.info(
            "preempted %s: %d tokens to recompute, free blocks %d -> %d",
            request.request_id, request.num_computed_tokens, free, self.space.num_free_blocks,
        )  # fmt: skip
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.num_preemptions += 1
        self.waiting.add(request)
