"""The scheduler's interface to KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from qkv_engine.request import Request


class BlockLike(Protocol):
    """A KV block of a group of layers, as far as pressure looks at it."""

    group: int
    rung: int
    floor: int

    @property
    def is_shared(self) -> bool: ...


class ShortageLike(Protocol):
    """Room that is wanted and is not there."""

    def eased(self, group: int, old: int, new: int, number: int = 1) -> bool:
        """Counts in that ``number`` blocks of a group step down from rung ``old`` to ``new``.

        Returns whether all fits then.
        """
        ...

    def without(self, group: int, rung: int, number: int) -> bool:
        """Counts in that ``number`` blocks of a group on ``rung`` are given up; returns whether all fits then."""
        ...


class FetchLike(Protocol):
    """What a waiting request lacks and host memory has, piece by piece in the order of its tokens, until ``end``."""

    @property
    def has_next(self) -> bool:
        """Whether there is a piece more that may be copied beside the next step."""
        ...

    @property
    def is_under_way(self) -> bool:
        """Whether some piece is on its way."""
        ...

    def has_room(self, spare: int) -> bool:
        """Whether the next piece has room beside the first block of its request, and ``spare`` ones."""
        ...

    def shortage(self, spare: int) -> ShortageLike:
        """The room that the next piece lacks then."""
        ...

    def fetch(self) -> bool:
        """Has the next piece fetched, for which there is room; ``False`` if it was given up meanwhile."""
        ...

    def end(self) -> None: ...


class KVSpace(Protocol):
    """KV memory for the scheduler; ``engine/kv/manager.py`` implements it."""

    def capacity(self, request: Request) -> int:
        """Tokens that fit for ``request`` alone, on its floor."""
        ...

    def begin_admission(self, step: int) -> None:
        """Updates demand before ``admits`` and ``within_quota``; a request gets at most one token in a ``step``."""
        ...

    def admits(self, request: Request) -> bool:
        """Whether ``request`` and all running ones fit together on their floors, with the tokens still to come."""
        ...

    def within_quota(self, request: Request) -> bool:
        """Whether the tenant of ``request`` stays within its share of memory if it runs too."""
        ...

    def begin_step(self, copy_nbytes: int | None) -> None:
        """Notes what has come from host memory; so many bytes may be copied beside the step, None: any number."""
        ...

    def write_ahead(self) -> None:
        """Has idle blocks copied to host memory beside the step, so that giving them up costs nothing."""
        ...

    def park(self, request: Request) -> int:
        """Has the cached blocks of ``request`` copied to host memory; returns how many of its tokens it keeps."""
        ...

    def begin_fetching(self, request: Request) -> FetchLike | None:
        """What host memory has of a waiting request beside the prefix cache, if it has more."""
        ...

    def open(self, request: Request) -> int:
        """Begins a request's table; returns how many of its tokens were found in the prefix cache."""
        ...

    def room_for(self, request: Request, num_tokens: int, spare: int = 0) -> int:
        """How many of the first ``num_tokens`` tokens could be stored now with ``spare`` blocks left over."""
        ...

    def shortage(self, request: Request, num_tokens: int, spare: int) -> ShortageLike:
        """The room that ``room_for`` of the same arguments lacks."""
        ...

    def shortage_of(self, num_blocks: int) -> ShortageLike:
        """The room that so many blocks on the widest rung lack in each group."""
        ...

    def lacking(self, running: Iterable[Request]) -> set[Request]:
        """Running requests whose next token begins a block that is not reserved yet."""
        ...

    def num_growing(self, running: Iterable[Request], num_tokens: int) -> int:
        """Running requests that decode and begin a block that is not reserved yet within their next ``num_tokens``."""
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserves room for the first ``num_tokens`` tokens; ``False``, and no change, if there is none."""
        ...

    def begin_narrower(self, request: Request) -> bool:
        """Has the states of a request that is about to start begin a rung lower; ``False`` if it allows none."""
        ...

    def trim(self, request: Request) -> None:
        """Gives back the blocks that no later token sees; due from ``next_passed_at`` computed tokens on."""
        ...

    def release(self, request: Request) -> None: ...

    def discard(self, request: Request) -> None:
        """Like ``release`` for a request whose KV is not trusted."""
        ...

    def computed(self, request: Request, num_tokens: int) -> None:
        """Notes that the KV of the first ``num_tokens`` tokens is computed; needed from ``next_cacheable_at`` on."""
        ...

    def shortage_to_keep(self, request: Request) -> ShortageLike | None:
        """The room that a checkpoint of the states of ``request`` lacks now; None if it lacks none."""
        ...

    def keep_state(self, request: Request) -> None:
        """Keeps a checkpoint of ``request`` if there is room; due at ``next_checkpoint_at`` computed tokens."""
        ...

    def has_blocks(self, number: int) -> bool:
        """Whether ``number`` blocks on the widest rung could be allocated now in each group."""
        ...

    def free_blocks(self) -> int:
        """The most blocks that ``has_blocks``; for the log."""
        ...

    def idle(self, number: int) -> list[Any]:
        """The first ``number`` cached blocks that no request uses to step down; fewer if no more can."""
        ...

    def idle_kinds(self) -> Mapping[tuple[int, int], int]:
        """Numbers by group and rung of the blocks that ``evict`` can give up."""
        ...

    def evict(self) -> bool:
        """Gives up one cached block that no request uses."""
        ...

    def blocks(self, request: Request) -> Iterator[BlockLike]:
        """All blocks of ``request``, and its slots."""
        ...

    def unsettled(self, request: Request) -> Iterator[tuple[BlockLike, int]]:
        """Blocks that may still step down, each with its age: tokens beyond the recent window, negative inside it.

        States, of rungs below zero, come last and are of all tokens.
        """
        ...

    def coldest(self, request: Request) -> tuple[BlockLike, int] | None:
        """The oldest of the widest blocks that may step down and that no other request holds, and its age."""
        ...

    def aged(self, running: Iterable[Request]) -> list[Request]:
        """The requests of ``running`` that have a block of ``unsettled`` beyond the recent window."""
        ...

    def block_end(self, num_computed: int) -> int:
        """Tokens up to the end of the block, or the sink, in which token ``num_computed`` lies."""
        ...

    def next_aging(self, request: Request) -> int:
        """Computed tokens, more than now, at which another block of ``request`` is old enough to step down, if any."""
        ...

    @property
    def is_shrinking(self) -> bool:
        """Whether memory is to become smaller than it is."""
        ...

    def shrink(self) -> int:
        """Takes free bytes out of memory that is to become smaller; returns the bytes that it lacks."""
        ...

    def shortage_of_shrink(self) -> ShortageLike:
        """The room that a shrink has to take still."""
        ...

    def demote(self, steps: list[tuple[Any, int]]) -> int:
        """Lets blocks step down to the given rungs, in order; returns how many did."""
        ...

    @property
    def num_rungs(self) -> int: ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def is_eager(self) -> bool: ...

    @property
    def has_windows(self) -> bool:
        """Whether there is anything to ``trim``."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether there are states to ``keep_state`` of."""
        ...

    def rung_name(self, group: int, rung: int) -> str: ...

    def nbytes(self, request: Request) -> int:
        """Bytes of a request's blocks."""
        ...

    def over_quota(self, nbytes: int) -> bool:
        """Whether ``nbytes`` are more than one tenant's share."""
        ...
