"""Turns of tenants that wait: who has the fewest requests running is next, and nobody takes all places of a batch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from qkv_engine.request import Request

from .queue import RequestQueue

SHARE = 7  # a tenant's places for each that it leaves free, so that another one's first request finds one at once


def in_turn(waiting: RequestQueue, running: RequestQueue) -> Iterator[Request]:
    """Waiting requests by priority, then by how many of their tenants run when the next is asked for, then arrival."""
    own: dict[str, deque[Request]] = {}
    for request in waiting:
        own.setdefault(request.params.tenant, deque()).append(request)
    heads = [_place(requests[0], running) for requests in own.values()]
    heapq.heapify(heads)
    while heads:
        requests = own[heads[0][-1]]
        place = _place(requests[0], running)
        if heads[0] != place:  # one of its tenant has started
            heapq.heapreplace(heads, place)
            continue
        request = requests.popleft()
        if requests:
            heapq.heapreplace(heads, _place(requests[0], running))
        else:
            heapq.heappop(heads)
        yield request


def _place(request: Request, running: RequestQueue) -> tuple[int, int, int, str]:
    tenant = request.params.tenant
    return request.params.priority, running.number_of(tenant), request.arrival, tenant


def leaves_places(held: int, free: int) -> bool:
    """Whether a tenant with ``held`` places may take one of ``free`` ones: its first, and more while some stay."""
    return free > 0 and (held == 0 or held < SHARE * (free - 1))
