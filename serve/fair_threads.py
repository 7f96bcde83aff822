"""Work on requests before the engine has them, such as tokenizing: in threads, in turns that are fair to tenants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from anyio import CapacityLimiter, to_thread

from .json_time import decoding_time

THREADS = 8
TENANT_THREADS = THREADS // 2  # of one tenant, so that another one finds a thread at once
LARGE = 1 << 18  # bytes of a body above which it is decoded in a thread, and counts for ``MAX_BYTES``
AT_ONCE = 250e-6  # seconds of decoding; what takes longer is decoded in a thread
MAX_BYTES = 1 << 23  # of large bodies in threads at once, unless one is alone; tokens take 200 bytes a character

T = TypeVar("T")


class Load(NamedTuple):
    """Whose work it is, and the bytes of the body that it is done on."""

    tenant: str
    nbytes: int


class _Turn(NamedTuple):
    nbytes: int  # 0 for a body that is not large
    given: asyncio.Future[None]


class FairThreads:
    """Threads for the work on requests. One event loop uses it.

    Of the tenants that wait the one with the fewest threads is next, of equal ones the one that was served longest ago.
    """

    def __init__(self) -> None:
        self._threads = CapacityLimiter(THREADS)
        self._waiting: dict[str, deque[_Turn]] = {}  # by tenant; the one that was served last is the last
        self._running: Counter[str] = Counter()  # threads by tenant
        self._nbytes = 0  # of large bodies that have a thread
        self._decoding = threading.Lock()
        self._rested = 0.0  # when the next one may decode

    async def run(self, load: Load, function: Callable[[], T]) -> T:
        """The result of ``function``, in a thread, when it is the tenant's turn."""
        tenant, nbytes = load
        turn = _Turn(nbytes if nbytes > LARGE else 0, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            await turn.given
        except asyncio.CancelledError:
            if turn.given.cancelled():
                self._leave(tenant, turn)
            else:  # both at once
                self._end(tenant, turn)
            raise
        try:
            return await to_thread.run_sync(function, limiter=self._threads)
        finally:
            self._end(tenant, turn)

    async def read(self, load: Load, body: bytes, decode: Callable[[bytes], T]) -> T:
        """What ``decode`` makes of JSON: at once, or in a thread where that takes long. Raises ``ApiError``."""
        is_large = load.nbytes > LARGE  # counting it takes long, too
        if not is_large and decoding_time(body) <= AT_ONCE:
            return decode(body)

        def decode_counted() -> T:
            if is_large:
                decoding_time(body)
            return decode(body)

        return await self.run(load, lambda: self.alone(decode_counted))

    def alone(self, decode: Callable[[], T]) -> T:
        """The result of ``decode``, in a thread of those that decode one at a time and for half of the time.

        While JSON is decoded no other thread of Python runs, and a step of the engine would wait at each operator.
        """
        with self._decoding:
            time.sleep(max(0.0, self._rested - time.monotonic()))
            begin = time.monotonic()
            try:
                return decode()
            finally:
                self._rested = 2 * time.monotonic() - begin

    def _give_turns(self) -> None:
        while (tenant := self._next()) is not None:
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # the last now
            self._running[tenant] += 1
            self._nbytes += turn.nbytes
            turn.given.set_result(None)

    def _next(self) -> str | None:
        """The tenant whose turn it is, if there is a thread for it, and room if its body is large."""
        if self._running.total() == THREADS:
            return None
        is_full = False  # for large bodies: no smaller one of them goes first, or a larger one might wait for ever
        for tenant in sorted(self._waiting, key=lambda name: self._running[name]):
            nbytes = self._waiting[tenant][0].nbytes
            if self._running[tenant] == TENANT_THREADS:
                break
            if not nbytes or not (is_full := is_full or 0 < self._nbytes > MAX_BYTES - nbytes):
                return tenant
        return None

    def _end(self, tenant: str, turn: _Turn) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._nbytes -= turn.nbytes
        self._give_turns()

    def _leave(self, tenant: str, turn: _Turn) -> None:
        """Takes back a turn that was not given, perhaps the one that others waited behind."""
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]
        self._give_turns()
