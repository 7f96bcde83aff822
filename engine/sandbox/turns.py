"""A job's sandboxes, which tenants take in turns: what is slow for one of them delays the others by one request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .process import Job
from .sandbox import Sandbox

NUMBER = 2  # sandboxes, so that one tenant, with one request at a time, leaves one free


@dataclass(eq=False)
class _Turn:
    tenant: str
    thread: int = field(default_factory=threading.get_ident)
    number: int = -1  # of its sandbox, once it is its turn


class Sandboxes:
    """``NUMBER`` sandboxes of one job. Thread-safe.

    Of the tenants that wait, and have no request under way, the one whose turn ended longest ago is next.
    """

    def __init__(self, job: Job, setup: Callable[[], bytes]):
        """``setup`` makes the message that a new process gets first."""
        self._all = [Sandbox(job, setup) for _ in range(NUMBER)]
        self._owners = [""] * NUMBER  # who used a sandbox last
        self._waiting: dict[str, list[_Turn]] = {}  # by tenant; whose turn ended last is the last
        self._running: dict[str, _Turn] = {}  # by tenant
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, tenant: str) -> Iterator[Sandbox]:
        """Waits for the tenant's turn; within the context the sandbox is the caller's."""
        turn = _Turn(tenant)
        under_way = self._running.get(tenant)
        if under_way is not None and under_way.thread == turn.thread:  # a finalizer asks in the middle of its thread's
            yield self._all[under_way.number]
            return
        try:
            self._enter(turn)
            yield self._all[turn.number]
        finally:
            self._leave(turn)

    def close(self) -> None:
        """Ends the processes. Another request starts another."""
        for sandbox in self._all:
            sandbox.close()

    def _enter(self, turn: _Turn) -> None:
        tenant = turn.tenant
        with self._changed:
            turns = self._waiting.setdefault(tenant, [])
            turns.append(turn)
            try:
                self._changed.wait_for(lambda: self._next() is turn)
                turn.number = self._choose(tenant)
                self._owners[turn.number] = tenant
                self._running[tenant] = turn
            finally:
                turns.remove(turn)
                if not turns:
                    del self._waiting[tenant]
                self._changed.notify_all()  # there may be a sandbox for the one behind

    def _leave(self, turn: _Turn) -> None:
        with self._changed:
            if self._running.get(turn.tenant) is turn:
                del self._running[turn.tenant]
                if turn.tenant in self._waiting:
                    self._waiting[turn.tenant] = self._waiting.pop(turn.tenant)  # the last now
            self._changed.notify_all()

    def _next(self) -> _Turn | None:
        if len(self._running) == NUMBER:
            return None
        return next((turns[0] for tenant, turns in self._waiting.items() if tenant not in self._running), None)

    def _choose(self, tenant: str) -> int:
        """The tenant's own sandbox, so that who ends a process waits for the next one, or else one that runs."""
        free = set(range(NUMBER)) - {turn.number for turn in self._running.values()}
        return min(free, key=lambda number: (self._owners[number] != tenant, not self._all[number].is_warm, number))
