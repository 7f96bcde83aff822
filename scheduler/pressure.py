"""What happens when KV memory runs short, in this order: cached blocks nobody uses are given up; the coldest blocks
step down one rung; no more requests are admitted; the youngest running request gives way.

The oldest running request never gives way. Since every request fits alone on its floor, it always finishes, so all do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from qkv_engine.config import BLOCK_TOKENS
from qkv_engine.request import Request

from .queue import ArrivalQueue

logger = logging.getLogger("qkv_engine")

# Blocks that step down in one go: small enough that no step is held up, large enough for one launch to pay.
RELIEF_BLOCKS = 8
AHEAD_PER_STEP = 2  # for every 64 running requests
EAGER_PER_STEP = 4  # for every 32 running requests


class Block(Protocol):
    """A block as pressure sees it."""

    rung: int
    refs: int
    floor: int


class KVSpace(Protocol):
    """What the scheduler needs of KV memory; ``engine/kv/space.py`` provides it."""

    def capacity(self, request: Request) -> int:
        """Tokens that fit for ``request`` alone, on its floor."""
        ...

    def admits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether ``request`` and all running ones fit together on their floors, with what they still may write."""
        ...

    def open(self, request: Request) -> int:
        """Begins a request's table; returns how many of its tokens were found in the prefix cache."""
        ...

    def room_for(self, request: Request, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` tokens could be stored now."""
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Room for the first ``num_tokens`` tokens; all or nothing."""
        ...

    def release(self, request: Request) -> None: ...

    def discard(self, request: Request) -> None:
        """Like ``release`` for a request whose KV is not to be trusted."""
        ...

    def computed(self, request: Request) -> None:
        """The KV of the first ``num_computed_tokens`` tokens is in the cache."""
        ...

    def free_blocks(self) -> int:
        """Blocks on the widest rung that could be allocated now."""
        ...

    def evict(self) -> bool:
        """Gives up one cached block that no request uses."""
        ...

    def unsettled(self, request: Request) -> Iterator[tuple[Block, int]]:
        """Blocks that may still step down, with how many tokens beyond the recent window they are; see the tables."""
        ...

    def demote(self, steps: list[tuple[Block, int]]) -> int:
        """Lets blocks step down to the given rungs; returns the bytes won."""
        ...

    @property
    def num_rungs(self) -> int: ...

    @property
    def is_eager(self) -> bool: ...

    def rung_name(self, rung: int) -> str: ...

    def nbytes(self, request: Request) -> int:
        """Bytes of a request's blocks."""
        ...

    def over_quota(self, nbytes: int) -> bool:
        """Whether ``nbytes`` are more than one tenant's share."""
        ...


class Candidate(NamedTuple):
    """A block that may step down, in the order in which blocks do: tuples compare field by field."""

    tenant: int  # 0 the one who needs room, 1 over its quota, 2 any other
    shared: bool
    rung: int
    newness: int  # minus the age, so that the coldest come first
    arrival: int
    index: int
    block: Block
    request: Request


class Pressure:
    """Makes room, and keeps some ahead of need. One object a scheduler; its candidate list lives for one step."""

    def __init__(self, space: KVSpace, running: ArrivalQueue):
        self.space, self.running = space, running
        self._candidates: list[Candidate] | None = None  # coldest last, to be popped

    def begin_step(self) -> None:
        """Forgets what the previous step found; then steps down what an eager ladder or the near future asks."""
        self._candidates = None
        if self.space.num_rungs == 1:
            return
        if self.space.is_eager:
            self._settle()
        self._look_ahead()

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Reserves the first ``num_tokens`` tokens of ``request``, stepping blocks down as needed."""
        while not self.space.reserve(request, num_tokens):
            if not self._relieve(request):
                return False
        return True

    def stretch(self, request: Request, num_tokens: int) -> int:
        """Like ``make_room`` for as many of the tokens as there can be room for; returns their number."""
        room = self.space.room_for(request, num_tokens)
        while room < num_tokens and self._relieve(request):
            room = self.space.room_for(request, num_tokens)
        return room if room and self.space.reserve(request, room) else 0

    def _relieve(self, request: Request) -> bool:
        """One bounded piece of relief; ``False`` when nothing is left to give."""
        if self.space.evict():
            return True
        return self.space.num_rungs > 1 and self._step_down(request.params.tenant, RELIEF_BLOCKS) > 0

    def _look_ahead(self) -> None:
        """Keeps one block free for every running request, a few blocks a step, so that no step has to wait for many."""
        if self.space.free_blocks() < len(self.running):
            while self.space.evict() and self.space.free_blocks() < len(self.running):
                pass
            if self.space.free_blocks() < len(self.running):
                self._step_down(None, AHEAD_PER_STEP * -(-len(self.running) // 64))

    def _settle(self) -> None:
        """Eager ladders: what is older than the recent window goes to its floor, once the prompt is computed."""
        budget, chosen = EAGER_PER_STEP * -(-len(self.running) // 32), list[tuple[Candidate, int]]()
        for request in self.running:
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            for index, (block, age) in enumerate(self.space.unsettled(request)):
                if age >= 0 and len(chosen) < budget:
                    found = Candidate(0, block.refs > 1, block.rung, -age, request.arrival, index, block, request)
                    chosen.append((found, block.floor))
            if len(chosen) == budget:
                break
        self._demote(chosen)

    def _step_down(self, tenant: str | None, number: int) -> int:
        """The ``number`` coldest blocks go down one rung; returns the bytes won. With a quota, nobody in it pays."""
        if not self._candidates:
            self._candidates = self._find_candidates(tenant)
        chosen: list[tuple[Candidate, int]] = []
        while self._candidates and len(chosen) < number:
            candidate = self._candidates.pop()
            if candidate.block.refs and candidate.block.rung == candidate.rung:
                chosen.append((candidate, candidate.rung + 1))
        return self._demote(chosen)

    def _find_candidates(self, tenant: str | None) -> list[Candidate]:
        usage: dict[str, int] = {}
        for request in self.running:
            name = request.params.tenant
            usage[name] = usage.get(name, 0) + self.space.nbytes(request)
        has_quota = self.space.over_quota(2**62)
        found: dict[int, Candidate] = {}
        for request in self.running:
            name = request.params.tenant
            rank = 0 if name == tenant else 1 if self.space.over_quota(usage[name]) else 2
            if rank == 2 and has_quota:
                continue
            for index, (block, age) in enumerate(self.space.unsettled(request)):
                candidate = Candidate(rank, block.refs > 1, block.rung, -age, request.arrival, index, block, request)
                twin = found.get(id(block))
                # Of a shared block's owners the one to whom it is newest decides.
                if twin is None or candidate.newness > twin.newness:
                    found[id(block)] = candidate
        return sorted((c for c in found.values() if c.newness <= 0), key=_order, reverse=True)

    def _demote(self, chosen: list[tuple[Candidate, int]]) -> int:
        if not chosen:
            return 0
        before = self.space.free_blocks()
        won = self.space.demote([(candidate.block, rung) for candidate, rung in chosen])
        if logger.isEnabledFor(logging.INFO):
            self._explain(chosen, before)
        return won

    def _explain(self, chosen: list[tuple[Candidate, int]], before: int) -> None:
        counts: dict[tuple[str, int, int], int] = {}
        for candidate, rung in chosen:
            key = (candidate.request.request_id, candidate.rung, rung)
            counts[key] = counts.get(key, 0) + 1
        for (name, old, new), number in counts.items():
            logger.info(
                "%s: %d blocks (%d tokens) stepped down %s -> %s; free 16-bit blocks %d -> %d",
                name, number, number * BLOCK_TOKENS, self.space.rung_name(old), self.space.rung_name(new),
                before, self.space.free_blocks(),
            )  # fmt: skip


def _order(candidate: Candidate) -> tuple[int, bool, int, int, int, int]:
    return candidate[:6]


def choose_victim(running: ArrivalQueue) -> Request:
    """The request to preempt: the youngest."""
    return running.youngest
