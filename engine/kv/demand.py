"""The blocks that running requests may come to hold, counted as they start, grow and end. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..config import BLOCK_TOKENS
from ..request import Request
from .table import SINK, BlockTables

OPEN_END_TOKENS = 1024  # output counted at admission for a request that named no max_tokens


class Share(NamedTuple):
    """Blocks of one request: those that stay dense, and those that may step down to its ``floor``."""

    floor: int
    dense: int
    narrow: int


class Demand:
    """The sum of some requests' shares."""

    __slots__ = ("_dense", "_narrow", "_requests", "_tables")

    def __init__(self, tables: BlockTables):
        self._tables = tables
        self._dense = 0
        self._narrow, self._requests = ([0] * len(tables.ladder.rungs) for _ in range(2))  # by floor

    def __len__(self) -> int:
        return sum(self._requests)

    def add(self, share: Share, times: int = 1) -> None:
        """Counts ``share`` in; with ``times=-1`` out again."""
        self._requests[share.floor] += times
        self._narrow[share.floor] += times * share.narrow
        self._dense += times * share.dense

    def plus(self, share: Share) -> Demand:
        """The sum of this demand and ``share``."""
        total = Demand(self._tables)
        total._dense, total._narrow, total._requests = self._dense, self._narrow[:], self._requests[:]
        total.add(share)
        return total

    def floors(self) -> Iterator[int]:
        """The floors of all requests, each once."""
        return (floor for floor, number in enumerate(self._requests) if number)

    def slots(self, rung: int) -> Counter[int]:
        """Slots by size when all blocks stand on their floors, or on ``rung`` where that is wider."""
        sizes = self._tables.sizes
        slots = Counter({sizes[0]: self._dense})
        for floor, number in enumerate(self._narrow):
            slots[sizes[min(floor, rung)]] += number
        if self._tables.ladder.sink:
            slots[sizes[SINK]] += len(self)
        return slots


class RunningDemand:
    """The demand of all running requests, and of each tenant's. A request may still write up to its ``max_tokens``.

    One that named none is expected to write a usual answer from where it stands, so what it demands grows.
    """

    def __init__(self, tables: BlockTables):
        self._tables = tables
        self.total = Demand(tables)
        self._tenants: dict[str, Demand] = {}
        self._shares: dict[Request, Share] = {}
        self._holds_until: dict[Request, int] = {}  # tokens of an open-ended request up to which its share is right

    def __len__(self) -> int:
        return len(self._shares)

    def add(self, request: Request, floor: int) -> None:
        """Counts in a request that begins to run."""
        share = self._shares[request] = self.share(request, floor)
        self._tenants.setdefault(request.params.tenant, Demand(self._tables)).add(share)
        self.total.add(share)
        if expected_tokens(request) < request.max_num_tokens:
            blocks = share.dense + share.narrow
            self._holds_until[request] = self._tables.ladder.sink + blocks * BLOCK_TOKENS - OPEN_END_TOKENS

    def remove(self, request: Request) -> None:
        """Counts out a request that does not run any more; nothing happens if it did not."""
        share = self._shares.pop(request, None)
        if share is None:
            return
        self._holds_until.pop(request, None)
        self.total.add(share, -1)
        tenant = self._tenants[request.params.tenant]
        tenant.add(share, -1)
        if not len(tenant):
            del self._tenants[request.params.tenant]

    def catch_up(self) -> None:
        """Counts what open-ended requests have grown by."""
        for request in [r for r, tokens in self._holds_until.items() if r.num_tokens > tokens]:
            floor = self._shares[request].floor
            self.remove(request)
            self.add(request, floor)

    def of_tenant(self, name: str) -> Demand | None:
        """The demand of a tenant's requests; ``None`` if none runs."""
        return self._tenants.get(name)

    def share(self, request: Request, floor: int) -> Share:
        """What a request demands now."""
        return Share(floor, *self._tables.split(expected_tokens(request), floor))


def expected_tokens(request: Request) -> int:
    """Tokens a request will hold: up to its ``max_tokens``, or a usual answer if it named none."""
    if request.params.max_tokens is not None:
        return request.max_num_tokens
    return min(request.max_num_tokens, max(request.num_tokens, request.num_prompt_tokens) + OPEN_END_TOKENS)
