"""The workers of a tensor-parallel engine, as rank 0 leads them."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import TypeVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..config import EngineConfig
from ..errors import QKVError, RankLostError
from .commands import Command, Setup, encode
from .process import WorkerProcess
from .process_ranks import ProcessRanks
from .watch import Patience, StallClock

HOST = "127.0.0.1"
DEATH_SECONDS = 0.5  # for the system to tell of a process' end, whose exchanges break off a moment before
PATIENCE = Patience()
T = TypeVar("T")


class WorkerGroup:
    """The processes of ranks 1 and up.

    Once one ends, or stands still for too long, every call but ``close`` raises ``RankLostError``.
    """

    def __init__(self, config: EngineConfig, device: torch.device):
        """Starts the workers, which join the group and load their parts of the weights beside rank 0.

        ``device``: of rank 0. Raises ``RankLostError`` if a worker does not come up.
        """
        self._lost: str | None = None
        self._cause: str | None = None  # found by a watch; all other errors are its consequences
        self._workers: list[WorkerProcess] = []
        group: list[ProcessRanks] = []
        self._finalizer = weakref.finalize(self, _end_all, self._workers, group)
        size = config.tensor_parallel
        store = TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
        try:
            for rank in range(1, size):
                self._workers.append(worker := WorkerProcess(rank))
                worker.send(pickle.dumps((config, rank, device.type, store.port)))
            self.replies()  # all have imported torch: joining does not wait for one that cannot
            self.ranks = ProcessRanks.join(0, size, store, device)
            group.append(self.ranks)
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            clock = StallClock(worker.rank, PATIENCE)
            given = weakref.ref(self), worker, clock, PATIENCE.tick
            Thread(target=_watch, args=given, daemon=True, name=f"rank {worker.rank}").start()

    def replies(self) -> None:
        """Waits for a reply of each worker. Raises the error that one replies with, and ``RankLostError``."""
        for worker in self._workers:
            reply = worker.receive()
            if isinstance(reply, QKVError):
                raise reply

    def set_up(self, setup: Setup) -> None:
        """Has all workers allocate memory as rank 0 did. Raises the error that one replies with."""
        message = encode(setup)
        for worker in self._workers:
            worker.send(message)
        self.replies()

    def lead(self, command: Command, work: Callable[[], T]) -> T:
        """Has all workers carry out ``command`` while rank 0 does ``work``, its own part.

        Raises ``RankLostError`` if that fails: the others wait for rank 0 in the middle of an exchange then.
        """
        message = encode(command)
        self.check()
        try:
            with self.waiting():
                for worker in self._workers:
                    worker.send(message)
                return work()
        except BaseException as error:
            self._lose(f"rank 0 broke off: {type(error).__name__}: {error}")
            raise self._error() from error

    def waiting(self) -> AbstractContextManager[None]:
        """Of rank 0, for results that the other ranks can hold up. One that stands still meanwhile is lost."""
        return self.ranks.progress.under_way()

    def abandon(self, why: str) -> None:
        """Ends the workers and a step under way, soon after this returns. From any thread."""
        self._cause = self._cause or why
        self._lose(why)
        for worker in self._workers:
            worker.kill()

    def check(self) -> None:
        """Raises ``RankLostError`` if a worker ended or stood still."""
        if self._lost is not None:
            raise self._error()

    def close(self) -> None:
        """Ends all workers, waits for them and leaves the group, of which no graph may be left. May be called again."""
        self._finalizer()

    def _error(self) -> RankLostError:
        why = self._cause or next(
            (worker.exit_message() for worker in self._workers if worker.ends_within(DEATH_SECONDS)), self._lost
        )
        return RankLostError(why or "a rank ended", remedy="Make a new Engine")

    def _lose(self, why: str) -> None:
        """Notes why the group is of no more use, and ends exchanges that would wait for ever."""
        if self._lost is None and self._finalizer.alive:
            self._lost = why
            self.ranks.abort()


def _watch(group_ref: weakref.ref[WorkerGroup], worker: WorkerProcess, clock: StallClock, tick: float) -> None:
    while (has_answered := worker.listen(tick)) is not None:
        group = group_ref()
        if group is None:
            continue  # the end of the process is near
        number = group.ranks.progress.number
        if (why := clock.tick(number, has_answered)) is not None:
            group.abandon(why)
        elif number is not None:
            worker.ask()
        del group
    group = group_ref()
    if group is not None:
        group._lose(worker.exit_message())


def _end_all(workers: list[WorkerProcess], group: list[ProcessRanks]) -> None:
    for worker in workers:
        worker.end()
    for ranks in group:
        ranks.leave()
