"""Blocks that may step down, coldest first, and states behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from qkv_engine.request import Request

from .queue import RequestQueue
from .space import BlockLike, KVSpace

NEVER = 2**62  # tokens: newer than any block, for a block that a request without a rank holds


class Candidate(NamedTuple):
    """A block that may step down; candidates sort in the order of stepping down, field by field."""

    rank: int  # of its request, 0 first; see ``Pressure._ranks``
    is_state: bool
    shared: bool
    order: int  # the rung of a block; how far a state is above its floor, in negative numbers
    newness: int  # minus the age, so that the coldest come first
    arrival: int
    place: int  # among its request's unsettled blocks, which come group by group
    rung: int
    block: BlockLike
    request: Request

    @classmethod
    def of(cls, rank: int, block: BlockLike, newness: int, place: int, request: Request) -> Candidate:
        """The candidate that ``block`` of ``request`` is as it stands."""
        order = block.rung - block.floor if is_state(block) else block.rung
        where = request.arrival, place, block.rung, block, request
        return cls(rank, is_state(block), block.is_shared, order, newness, *where)

    def next(self) -> Candidate:
        """The same a rung lower."""
        return self._replace(rung=self.rung + 1, order=self.order + 1)


def is_state(block: BlockLike) -> bool:
    """Whether a block that may step down is a state, which its request has for life."""
    return block.rung < 0


class Coldest:
    """Blocks of running requests that may step down, coldest first; valid for one step, until a block changes hands.

    ``ranks``: the requests whose blocks may step down, each with its rank. Unshared blocks of the first rank go first;
    while enough requests have such blocks, only the coldest block of each is looked at. States go last of a rank.
    """

    def __init__(self, space: KVSpace, running: RequestQueue, ranks: Mapping[Request, int]):
        self._space, self._running, self._ranks = space, running, ranks
        self._followers: dict[Request, Iterator[Candidate]] | None = {}  # None once the heap has all eligible blocks
        self._heap = self._heads()
        heapify(self._heap)

    def take(self, number: int, is_enough: Callable[[Candidate], bool] = lambda _: False) -> list[Candidate]:
        """The ``number`` coldest blocks, fewer where ``is_enough`` says so of the last one, or all there are.

        Each is taken to step down a rung before the next call.
        """
        if self._followers is not None and len(self._heap) < number:
            self._followers, self._heap = None, eligible(self._space, self._running, self._ranks)
            heapify(self._heap)
        chosen = []
        for _ in range(min(number, len(self._heap))):
            chosen.append(heappop(self._heap))
            self._push_follower(chosen[-1])
            if is_enough(chosen[-1]):
                break
        for candidate in chosen:
            if candidate.rung + 1 < candidate.block.floor:
                heappush(self._heap, candidate.next())
        return chosen

    def _heads(self) -> list[Candidate]:
        """The coldest unshared block of each request of the first rank."""
        first, heads = min(self._ranks.values(), default=0), []
        for request, rank in self._ranks.items():
            found = self._space.coldest(request) if rank == first else None
            if found is not None:
                block, age = found
                heads.append(Candidate.of(rank, block, -age, 0, request))
        return heads

    def _push_follower(self, candidate: Candidate) -> None:
        """Pushes the next block of the request whose coldest block was taken."""
        if self._followers is None:
            return
        request = candidate.request
        if request not in self._followers:
            own = [
                Candidate.of(candidate.rank, block, -age, place, request)
                for place, (block, age) in enumerate(self._space.unsettled(request))
                if age >= 0 and not block.is_shared and not is_state(block)
            ]
            self._followers[request] = iter(sorted(own)[1:])
        follower = next(self._followers[request], None)
        if follower is not None:
            heappush(self._heap, follower)


def eligible(
    space: KVSpace, running: RequestQueue, ranks: Mapping[Request, int], *, even_recent: bool = False
) -> list[Candidate]:
    """Blocks of the requests in ``ranks`` that may step down now, each once, in no order.

    A shared block has the age that is newest among its owners, and the last of their ranks. With ``even_recent``
    blocks in a recent window count too, unless they are on the widest rung.
    """
    found: dict[int, Candidate] = {}
    counts_all = len(ranks) == len(running) or _have_shared(space, ranks)
    for request in running if counts_all else ranks:
        own_rank = ranks.get(request)
        for index, (block, age) in enumerate(space.unsettled(request)):
            twin = found.get(id(block))
            rank = max(own_rank or 0, twin.rank if twin else 0)
            newness = NEVER if own_rank is None else -age
            if twin is None or newness > twin.newness:
                found[id(block)] = Candidate.of(rank, block, newness, index, request)
            elif rank > twin.rank:
                found[id(block)] = twin._replace(rank=rank)
    return [c for c in found.values() if c.newness <= 0 or (even_recent and c.rung and c.newness < NEVER)]


def eligible_blocks(space: KVSpace, running: RequestQueue, ranks: Mapping[Request, int]) -> list[BlockLike]:
    """The blocks of ``eligible``, each once, in no order."""
    blocks = [block for request in ranks for block, age in space.unsettled(request) if age >= 0]
    if any(block.is_shared for block in blocks):
        blocks = [candidate.block for candidate in eligible(space, running, ranks)]
    return blocks


class Tally:
    """Numbers of eligible ``blocks`` by group, rung and floor, kept while they step down and requests begin."""

    def __init__(self, blocks: Iterable[BlockLike]):
        self._kinds = {block: (block.group, block.rung, block.floor) for block in blocks}
        self._numbers = Counter(self._kinds.values())

    def items(self) -> Iterable[tuple[tuple[int, int, int], int]]:
        """The kinds of blocks that there are, each with their number."""
        return (+self._numbers).items()

    def stepped_down(self, blocks: Iterable[BlockLike]) -> None:
        """Counts ``blocks`` on their new rungs."""
        for block in blocks:
            if self._drop(block):
                self._count(block)

    def joined(self, space: KVSpace, request: Request) -> None:
        """Counts the blocks that ``request`` begins with, which other requests may hold, as it allows."""
        counted = {block for block in space.blocks(request) if self._drop(block)}
        for block, age in space.unsettled(request):
            if age >= 0 and (block in counted or not block.is_shared):
                self._count(block)

    def _count(self, block: BlockLike) -> None:
        if block.rung < block.floor:
            kind = self._kinds[block] = block.group, block.rung, block.floor
            self._numbers[kind] += 1

    def _drop(self, block: BlockLike) -> bool:
        """Counts ``block`` out; whether it was counted."""
        kind = self._kinds.pop(block, None)
        if kind is not None:
            self._numbers[kind] -= 1
        return kind is not None


def _have_shared(space: KVSpace, requests: Iterable[Request]) -> bool:
    """Whether some blocks of ``requests`` that are old enough to step down are shared."""
    return any(block.is_shared for r in requests for block, age in space.unsettled(r) if age >= 0)
