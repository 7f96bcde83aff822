"""Queues of waiting and running requests in order of service."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator

from qkv_engine.request import Request


class RequestQueue:
    """Requests by priority, those of equal priority in order of arrival. A preempted request returns to its old place.

    The first one is served before all others and gives way to none; the last one gives way to all.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._of = Counter[str]()  # numbers of tenants' requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    @property
    def tenants(self) -> Collection[str]:
        """Those who have requests in it."""
        return self._of.keys()

    def number_of(self, tenant: str) -> int:
        """The number of a tenant's requests."""
        return self._of[tenant]

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=_place)
        self._of[request.params.tenant] += 1

    def remove(self, request: Request) -> None:
        """Takes ``request`` out. Raises ``ValueError`` if it is not in the queue."""
        index = bisect.bisect_left(self._requests, _place(request), key=_place)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not in the queue")
        del self._requests[index]
        self._of[request.params.tenant] -= 1
        if not self._of[request.params.tenant]:
            del self._of[request.params.tenant]


def _place(request: Request) -> tuple[int, int]:
    return request.params.priority, request.arrival
