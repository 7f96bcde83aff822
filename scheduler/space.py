"""KV memory as the scheduler asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from qkv_engine.request import Request


class Block(Protocol):
    """A block as pressure sees it."""

    rung: int
    refs: int
    floor: int

    @property
    def is_shared(self) -> bool: ...


class KVSpace(Protocol):
    """What the scheduler needs of KV memory; ``engine/kv/manager.py`` provides it."""

    def capacity(self, request: Request) -> int:
        """Tokens that fit for ``request`` alone, on its floor."""
        ...

    def begin_admission(self, step: int) -> None:
        """To be called before the next two with the number of the step; a step gives a request at most one token."""
        ...

    def admits(self, request: Request) -> bool:
        """Whether ``request`` and all running ones fit together on their floors, with what they still may write."""
        ...

    def within_quota(self, request: Request) -> bool:
        """Whether the tenant of ``request`` stays within its share of memory if it runs too."""
        ...

    def open(self, request: Request) -> int:
        """Begins a request's table; returns how many of its tokens were found in the prefix cache."""
        ...

    def room_for(self, request: Request, num_tokens: int, spare: int = 0) -> int:
        """How many of the first ``num_tokens`` tokens could be stored now with ``spare`` blocks left over."""
        ...

    def lacking(self, running: Iterable[Request]) -> set[Request]:
        """Running requests whose next token begins a block that is not reserved yet."""
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Room for the first ``num_tokens`` tokens; all or nothing."""
        ...

    def release(self, request: Request) -> None: ...

    def discard(self, request: Request) -> None:
        """Like ``release`` for a request whose KV is not to be trusted."""
        ...

    def computed(self, request: Request, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` tokens is in the cache. Told from ``request.next_cacheable_at`` on."""
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

    def coldest(self, request: Request) -> tuple[Block, int] | None:
        """The oldest of the widest blocks that may step down and that no other request holds, and its age."""
        ...

    def aged(self, running: Iterable[Request]) -> list[Request]:
        """Those of all running requests of which a block of ``unsettled`` is beyond the recent window."""
        ...

    def next_aging(self, request: Request) -> int:
        """Computed tokens, more than now, at which another block of ``request`` is old enough to step down, if any."""
        ...

    def demote(self, steps: list[tuple[Any, int]]) -> int:
        """Lets blocks step down to the given rungs, in order; returns how many did."""
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
