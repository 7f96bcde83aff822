"""What callers tell of how long cached pieces are of use: retained for a time, of a session, done. No torch.

Retained pieces yield after all others that no request holds, those of sessions that are done before them. Nothing else
changes: blocks step down as ever, and whoever runs takes what it needs.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

DONE, PLAIN, RETAINED = range(3)  # in the order of making room
RETAINED_SHARE: Final = 0.5  # of memory, for the retained pieces of all tenants together
MAX_SESSIONS: Final = 4096  # that are known; the one that was used longest ago is forgotten
MAX_DONE: Final = 2**16  # pieces


class _Life(NamedTuple):
    """A retained piece: until when, in seconds of the clock, for which tenant, and the bytes that count for it."""

    until: float
    tenant: str
    nbytes: int


class Hints:
    """The lives of pieces by key. ``most_nbytes``: of retained pieces; ``tenant_nbytes``: of those of one tenant."""

    def __init__(self, most_nbytes: int, tenant_nbytes: int, clock: Callable[[], float] = time.monotonic):
        self._most_nbytes, self._tenant_nbytes, self._clock = most_nbytes, tenant_nbytes, clock
        self._lives: dict[bytes, _Life] = {}
        self._ends: list[tuple[float, bytes]] = []  # a heap, some of whose items are out of date
        self._nbytes: Counter[str] = Counter()  # retained, by tenant
        self._sessions: OrderedDict[tuple[str, str], dict[bytes, None]] = OrderedDict()  # by tenant and name
        self._num_sessions: Counter[bytes] = Counter()  # of which a piece is
        self._done: dict[bytes, None] = {}  # ends of prefixes first

    @property
    def retained_nbytes(self) -> int:
        """Bytes of retained pieces, as if they stood on the widest rung."""
        return self._nbytes.total()

    @property
    def has_ranks(self) -> bool:
        """Whether some piece is not ``PLAIN``."""
        return bool(self._done or self._lives)

    def rank(self, key: bytes) -> int:
        """When the piece of ``key`` makes room: ``DONE``, ``PLAIN`` or ``RETAINED``."""
        return DONE if key in self._done else RETAINED if key in self._lives else PLAIN

    def done_keys(self) -> Iterator[bytes]:
        """The pieces that are done, in the order of making room."""
        return iter(self._done)

    def note(self, keys: Sequence[bytes], nbytes: int, tenant: str, session: str, retain: float | None) -> None:
        """Notes the hints of a request of ``tenant`` whose pieces, of ``nbytes`` each, have these ``keys`` in order."""
        for key in keys:
            self._done.pop(key, None)
        if session:
            self._note_session(keys, (tenant, session))
        if retain is not None:
            until = self._clock() + retain
            for key in keys:
                if not self._retain(key, _Life(until, tenant, nbytes)):
                    return

    def _note_session(self, keys: Sequence[bytes], name: tuple[str, str]) -> None:
        own = self._sessions.setdefault(name, {})
        self._sessions.move_to_end(name)
        for key in keys:
            if key not in own:
                own[key] = None
                self._num_sessions[key] += 1
        if len(self._sessions) > MAX_SESSIONS:
            self._leave(self._sessions.popitem(last=False)[1])

    def _retain(self, key: bytes, life: _Life) -> bool:
        """Retains a piece, for the longest time that was asked for; ``False`` if that is too much."""
        before = self._lives.get(key)
        if before is not None and before.until >= life.until:
            return True
        self._end(key)
        total, own = self._nbytes.total() + life.nbytes, self._nbytes[life.tenant] + life.nbytes
        if total > self._most_nbytes or own > self._tenant_nbytes:
            return False
        self._lives[key] = life
        self._nbytes[life.tenant] += life.nbytes
        heappush(self._ends, (life.until, key))
        return True

    def expire(self) -> list[bytes]:
        """Ends the lives whose time is over; returns their keys."""
        ended, now = list[bytes](), self._clock() if self._ends else 0.0
        while self._ends and self._ends[0][0] <= now:
            until, key = heappop(self._ends)
            life = self._lives.get(key)
            if life is not None and life.until <= until:
                self._end(key)
                ended.append(key)
        return ended

    def done(self, tenant: str, session: str) -> list[bytes]:
        """Ends a session; returns the keys of its pieces that no other session has, ends of prefixes first."""
        keys = self._leave(self._sessions.pop((tenant, session), {}))
        for key in keys:
            self._end(key)
            self._done[key] = None
        while len(self._done) > MAX_DONE:
            del self._done[next(iter(self._done))]
        return keys

    def used(self, key: bytes) -> None:
        """Notes that somebody used a piece: if it was done, it is no more."""
        self._done.pop(key, None)

    def forget(self, key: bytes) -> None:
        """Notes that nothing is left of a piece."""
        self._done.pop(key, None)
        self._end(key)

    def _leave(self, keys: Iterable[bytes]) -> list[bytes]:
        """Takes a session off the pieces of ``keys``; returns those that are of none then, the last first."""
        alone = []
        for key in reversed(list(keys)):
            self._num_sessions[key] -= 1
            if not self._num_sessions[key]:
                del self._num_sessions[key]
                alone.append(key)
        return alone

    def _end(self, key: bytes) -> None:
        life = self._lives.pop(key, None)
        if life is not None:
            self._nbytes[life.tenant] -= life.nbytes
            if not self._nbytes[life.tenant]:
                del self._nbytes[life.tenant]
