"""The blocks that running requests may come to hold, counted as they start, grow and end. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..request import Request
from .table import BlockTables

OPEN_END_BLOCKS = 8  # output expected without max_tokens; more admits fewer requests, less leads to more preemptions


class Share(NamedTuple):
    """Blocks of one request of ``num_tokens``, by group: those that stay dense, and those that may be on its floor."""

    floor: int
    num_tokens: int
    blocks: Sequence[tuple[int, int]]


class Demand:
    """The sum of some requests' shares."""

    __slots__ = ("_dense", "_narrow", "_requests", "_tables")

    def __init__(self, tables: BlockTables):
        self._tables = tables
        self._requests = [0] * tables.spec.num_rungs  # by floor
        self._dense = [0] * len(tables.groups)
        self._narrow = [self._requests[:] for _ in tables.groups]  # by group and floor

    def __len__(self) -> int:
        return sum(self._requests)

    def add(self, share: Share, times: int = 1) -> None:
        """Counts ``share`` in; with ``times=-1`` out again."""
        self._requests[share.floor] += times
        for group, (dense, narrow) in enumerate(share.blocks):
            self._dense[group] += times * dense
            self._narrow[group][share.floor] += times * narrow

    def plus(self, share: Share) -> Demand:
        """The sum of this demand and ``share``."""
        total = Demand.__new__(Demand)
        total._tables, total._requests, total._dense = self._tables, self._requests[:], self._dense[:]
        total._narrow = [narrow[:] for narrow in self._narrow]
        total.add(share)
        return total

    def floors(self) -> Iterator[int]:
        """The floors of all requests, each once."""
        return (floor for floor, number in enumerate(self._requests) if number)

    def slots(self, rung: int) -> dict[int, int]:
        """Slots by size when all blocks and states stand on their floors, or on ``rung`` where that is wider."""
        slots: dict[int, int] = {}
        for group, dense, narrow in zip(self._tables.groups, self._dense, self._narrow, strict=True):
            sizes, floors = group.sizes, group.spec.floors
            slots[sizes[0]] = slots.get(sizes[0], 0) + dense
            for floor, number in enumerate(narrow):
                if number:
                    size = sizes[floors[min(floor, rung)]]
                    slots[size] = slots.get(size, 0) + number
            for floor, number in enumerate(self._requests):
                for size in group.spec.slot_sizes(min(floor, rung)) if number else ():
                    slots[size] = slots.get(size, 0) + number
        return slots


class RunningDemand:
    """The demand of all running requests, and of each tenant's. A request may still write up to its ``max_tokens``.

    A request without ``max_tokens`` is expected to write ``open_end_tokens`` from where it stands, so its demand grows.
    It gets at most one token a step, so it is looked at again in the first step in which its demand may have grown.
    """

    def __init__(self, tables: BlockTables, open_end_blocks: int = OPEN_END_BLOCKS):
        self._tables = tables
        self.open_end_tokens = open_end_blocks * tables.spec.block_tokens
        self.total = Demand(tables)
        self._tenants: dict[str, Demand] = {}
        self._shares: dict[Request, Share] = {}
        self._step = 0
        self._due: dict[Request, int] = {}  # the step in which an open-ended request is looked at again
        self._calendar: list[tuple[int, int, Request]] = []  # heap by that step; entries that ``_due`` lacks are void
        self._serials = count()

    def __len__(self) -> int:
        return len(self._shares)

    def add(self, request: Request) -> None:
        """Counts in a request that begins to run."""
        self._count(request, self.share(request))

    def remove(self, request: Request) -> None:
        """Counts out a request that does not run any more; nothing happens if it did not."""
        share = self._shares.pop(request, None)
        if share is None:
            return
        self._due.pop(request, None)
        self.total.add(share, -1)
        tenant = self._tenants[request.params.tenant]
        tenant.add(share, -1)
        if not len(tenant):
            del self._tenants[request.params.tenant]

    def catch_up(self, step: int) -> None:
        """Counts the growth of open-ended requests until ``step``, which is later than any before."""
        self._step = step
        while self._calendar and self._calendar[0][0] <= step:
            due, _, request = heappop(self._calendar)
            if self._due.get(request) == due:
                self.remove(request)
                self.add(request)

    def _count(self, request: Request, share: Share) -> None:
        self._shares[request] = share
        self.total.add(share)
        tenant = request.params.tenant
        if tenant not in self._tenants:
            self._tenants[tenant] = Demand(self._tables)
        self._tenants[tenant].add(share)
        if request.params.max_tokens is not None:
            return
        group = self._tables.spec.main
        most = group.tokens_in(group.blocks_for(share.num_tokens))
        if most < request.max_num_tokens:
            due = self._due[request] = self._step + max(1, most + 1 - self.open_end_tokens - request.num_tokens)
            heappush(self._calendar, (due, next(self._serials), request))

    def of_tenant(self, name: str) -> Demand | None:
        """The demand of a tenant's requests; ``None`` if none runs."""
        return self._tenants.get(name)

    def share(self, request: Request) -> Share:
        """The blocks that a request demands now."""
        expected, floor = self._expected_tokens(request), request.floor
        groups = self._tables.spec.groups
        return Share(floor, expected, [group.split(expected, group.floors[floor]) for group in groups])

    def _expected_tokens(self, request: Request) -> int:
        """Tokens that a request will hold: up to its ``max_tokens``, or ``open_end_tokens`` more if it named none."""
        if request.params.max_tokens is not None:
            return request.max_num_tokens
        return min(request.max_num_tokens, max(request.num_tokens, request.num_prompt_tokens) + self.open_end_tokens)
